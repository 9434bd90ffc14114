"""Convert the policy's tensors to the names and shapes of its checkpoint, which vLLM expects.

    held: (name in memory, tensor) ─▶ CheckpointNames.convert ─▶ (name in the checkpoint, tensor)

In memory, transformers joins and renames tensors: a layer's experts are one tensor, and a multimodal
checkpoint's text tower is a model of its own. `save_pretrained` converts a whole model. This module converts
the smallest possible part: one tensor (dense models: unchanged; joined experts), or else the tensors of one
layer.

Invariant: `convert` yields what `save_pretrained` would write, in the model's order.
"""

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from protocol.errors import ConfigError

Tensors = dict[str, torch.Tensor]
Specs = dict[str, tuple[torch.Size, torch.dtype]]


def held(policy: PreTrainedModel) -> Tensors:
    """Return the tensors that a checkpoint is made from, without gathering any.

    They are parameters and persistent buffers, layer by layer, tied tensors once. Buffers have the type `nn.Buffer`,
    which a load does not keep. An adapted layer has its base weight, under the name without an adapter.
    """
    buffers = {id(buffer) for buffer in policy.buffers()}
    left_out = policy._keys_to_ignore_on_save or ()
    tensors = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in policy.state_dict(keep_vars=True).items()
        if ".lora_" not in name and name not in left_out
    }
    name_of: dict[int, str] = {}
    for name, tensor in tensors.items():
        if name_of.setdefault(id(tensor), name) in policy.all_tied_weights_keys:
            name_of[id(tensor)] = name  # the name to which the others are tied
    return {
        name: nn.Buffer(tensor) if id(tensor) in buffers else tensor
        for name, tensor in tensors.items()
        if name_of[id(tensor)] == name
    }


def tied_names(policy: PreTrainedModel) -> dict[str, str]:
    """Return the checkpoint names of tied tensors, each with that of the tensor that the checkpoint has for both."""

    def renamed(name: str) -> str:
        return next(iter(revert_weight_conversion(policy, {name: torch.empty(0, device="meta")})))

    return {renamed(name): renamed(source) for name, source in policy.all_tied_weights_keys.items()}


def differing_tied_weights(name: str, source: str) -> ConfigError:
    """Return the error for files with two different tensors for tied weights. vLLM would read only one of them."""
    return ConfigError(
        f"model: its config ties {name} to {source}, but its files have two different tensors; remove {name} from the "
        "files, or set tie_word_embeddings = false in config.json if both are meant"
    )


class CheckpointNames:
    """Conversion of one policy's tensors to those of its checkpoint."""

    def __init__(self, policy: PreTrainedModel, tensors: Tensors) -> None:
        """Plan the conversion from the names, shapes and dtypes of `tensors`.

        Raises:
            ConfigError: The tensors cannot be converted in parts.
        """
        self._policy = policy
        self._renamed: dict[str, str] = {}
        """New names of the tensors whose values stay the same."""
        self._group_of: dict[str, tuple[str, ...]] = {}
        """Group in which each other tensor is converted."""
        self._meta = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()}
        self._cut(self._meta)

    def convert(self, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each group as soon as it is complete, keeping only one in memory."""
        waiting: Tensors = {}
        for name, tensor in named:
            if name in self._renamed:
                yield self._renamed[name], tensor
                continue
            waiting[name] = tensor.detach()
            del tensor  # otherwise it would stay until the next is gathered
            group = self._group_of[name]
            if waiting.keys() >= set(group):
                yield from self._revert({name: waiting.pop(name) for name in group}).items()

    def unchanged(self, name: str) -> str | None:
        """Return the checkpoint name of a tensor that `convert` only renames, otherwise None."""
        return self._renamed.get(name)

    def parts(self) -> list[tuple[tuple[str, ...], tuple[str, ...], bool]]:
        """Return the groups: their names in memory and in the checkpoint, and whether the tensors are alike in both."""
        renamed = [((name,), (new_name,), True) for name, new_name in self._renamed.items()]
        groups = dict.fromkeys(self._group_of.values())
        return renamed + [
            (group, tuple(self._revert({name: self._meta[name] for name in group})), False) for group in groups
        ]

    def _revert(self, tensors: Tensors) -> Tensors:
        return revert_weight_conversion(self._policy, tensors)

    def _cut(self, meta: Tensors) -> None:
        """Find the smallest groups that convert as they do in the whole model.

        A group is a single tensor, a layer, or everything left.
        """
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
                f"{type(self._policy).__name__} cannot be trained: its weights (such as {odd[0]}) cannot be converted "
                "to the names of its checkpoint in parts; try another version of transformers, or use another model"
            )

    def _left(self, meta: Tensors) -> list[str]:
        return [name for name in meta if name not in self._renamed and name not in self._group_of]

    def _attempt(self, tensors: Tensors) -> Tensors | None:
        try:
            return self._revert(tensors)
        except Exception:  # an operation on incomplete inputs may raise anything
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
