"""The policy's tensors under the names and shapes of its checkpoint, which are those that vLLM and other programs know.

    held: (name in memory, tensor) ─▶ CheckpointNames.convert ─▶ (name in the checkpoint, tensor)

In memory transformers joins and renames: a layer's experts are one tensor, a multimodal checkpoint's text tower is a model of its
own. What `save_pretrained` does to a whole model is done here to as little as can be converted by itself: one tensor where that is
enough (dense models: the very same one; joined experts), else the tensors of one layer. Invariant: `convert` yields what
`save_pretrained` would write, in the model's order.
"""

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from protocol.errors import ConfigError

Tensors = dict[str, torch.Tensor]
Specs = dict[str, tuple[torch.Size, torch.dtype]]


def held(policy: PreTrainedModel) -> Tensors:
    """What a checkpoint is made from: parameters and persistent buffers, layer by layer, a tied one once, nothing gathered.

    Of an adapted layer the weight that the adapter is merged into, under the name that it has without one.
    """
    left_out = policy._keys_to_ignore_on_save or ()
    tensors = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in policy.state_dict(keep_vars=True).items()
        if ".lora_" not in name and name not in left_out
    }
    name_of: dict[int, str] = {}
    for name, tensor in tensors.items():
        if name_of.setdefault(id(tensor), name) in policy.all_tied_weights_keys:
            name_of[id(tensor)] = name  # the one that the others are tied to
    return {name: tensor for name, tensor in tensors.items() if name_of[id(tensor)] == name}


class CheckpointNames:
    """How one policy's tensors become those of its checkpoint."""

    def __init__(self, policy: PreTrainedModel, tensors: Tensors) -> None:
        """Of `tensors` only names, shapes and dtypes are looked at. Raises ConfigError if no part can be converted by itself."""
        self._policy = policy
        self._renamed: dict[str, str] = {}
        """Those whose values stay as they are."""
        self._group_of: dict[str, tuple[str, ...]] = {}
        """The others, each with all that are converted together with it."""
        self._cut({name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()})

    def convert(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each group as soon as all of it has come; no more than one is kept."""
        waiting: Tensors = {}
        for name, tensor in named:
            if name in self._renamed:
                yield self._renamed[name], tensor
                continue
            waiting[name] = tensor.detach()
            del tensor  # or it would outlive its conversion, until the next has been gathered
            group = self._group_of[name]
            if waiting.keys() >= set(group):
                yield from self._revert({name: waiting.pop(name) for name in group}).items()

    def _revert(self, tensors: Tensors) -> Tensors:
        return revert_weight_conversion(self._policy, tensors)

    def _cut(self, meta: Tensors) -> None:
        """Find the smallest groups that are converted as in the whole: a tensor alone, a layer, all that is left."""
        whole = _specs(self._revert(dict(meta)))
        made: set[str] = set()
        keys: list[Callable[[str], str]] = [lambda name: name, _layer_of, lambda name: ""]
        for key in keys:
            candidates: dict[str, list[str]] = {}
            for name in self._left(meta):
                candidates.setdefault(key(name), []).append(name)
            for group in map(tuple, candidates.values()):
                part = self._attempt({name: meta[name] for name in group})
                if part and _specs(part).items() <= whole.items() and made.isdisjoint(part):
                    made |= part.keys()
                    self._remember(group, part, meta)
        odd = sorted({*self._left(meta)} | (whole.keys() ^ made))
        if odd:
            raise ConfigError(
                f"{type(self._policy).__name__} cannot be trained: its weights (such as {odd[0]}) cannot be given the names of its "
                "checkpoint piece by piece; another version of transformers may know how"
            )

    def _left(self, meta: Tensors) -> list[str]:
        return [name for name in meta if name not in self._renamed and name not in self._group_of]

    def _attempt(self, tensors: Tensors) -> Tensors | None:
        try:
            return self._revert(tensors)
        except Exception:  # whatever an operation raises that lacks a part of what it works on
            return None

    def _remember(self, group: tuple[str, ...], part: Tensors, meta: Tensors) -> None:
        ((new_name, tensor), *others) = part.items()
        if not others and tensor is meta[group[0]]:
            self._renamed[group[0]] = new_name
        else:
            self._group_of |= dict.fromkeys(group, group)


def _layer_of(name: str) -> str:
    return re.sub(r"(\.\d+)\..*", r"\1", name)


def _specs(tensors: Tensors) -> Specs:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
