"""Let the routers of a mixture-of-experts policy choose the experts that the server chose (routing replay).

    arrays of a group ─▶ lay_out: Routing of a pack ─▶ replayed: layer l ─▶ its torch.topk returns experts[:, l]

Small differences between server and learner flip a router's choice, and with it the logprobs of the token and of
those after it (R3, arXiv 2510.11370). A router ranks the scores of all experts with topk. Here, that call returns the
server's choice with the learner's scores. Everything after it, such as renormalization, is the family's own, and the
gradient flows through the scores of the chosen experts.
Invariant: each pass replays every layer with a router, also where the backward pass computes it again.

Suffixes: N packed tokens, S tokens that a router sees, B completions, L layers, K experts per token, E experts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig

from learner.forward.attention import layers_of
from learner.forward.pack import Pack
from protocol.messages import RoutingShape

OWN = -1
"""Expert id of a token whose experts the learner's router chooses."""
NUM_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
NUM_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
"""Names of these numbers in the configs of transformers, in vLLM's order."""
Choose = Callable[[int, torch.Tensor, Any], Any]
"""Function of a layer's number, the scores and the result of topk, which returns the result to use."""
_in_this_pass: ContextVar[tuple[list[nn.Module], Choose] | None] = ContextVar("_in_this_pass", default=None)
"""Layers of the current pass, and what its routers choose."""
routers: WeakKeyDictionary[nn.Module, "Routers"] = WeakKeyDictionary()
"""Routers of each model that was found to replay (replay_check.py)."""


class Routers(msgspec.Struct, frozen=True):
    """Routers of a model, and the layers that have one."""

    shape: RoutingShape
    layers: frozenset[int]

    def is_choice(self, scores: torch.Tensor, indices: torch.Tensor) -> bool:
        """Return whether this call of topk chooses the experts of tokens."""
        return scores.ndim == 2 and scores.shape[1] == self.shape.num_experts and (
            indices.shape == (len(scores), self.shape.num_per_token)
        )  # fmt: skip


class Routing(msgspec.Struct, eq=False, kw_only=True):
    """Server's choices for the tokens of a pack, on the CPU, and how often the learner alone would differ."""

    experts_NLK: torch.Tensor
    """Expert ids as int16, OWN for a token that the server did not return."""
    num_choices: int = 0
    num_changed: torch.Tensor | float = 0.0
    """Number of choices in the passes since `pop_counts`, and of those in which the learner's own set was another."""

    def pop_counts(self) -> tuple[int, torch.Tensor | float]:
        """Return and reset `num_choices` and `num_changed`."""
        counts, (self.num_choices, self.num_changed) = (self.num_choices, self.num_changed), (0, 0.0)
        return counts


def routing_shape(config: PreTrainedConfig) -> RoutingShape | None:
    """Return the shape of a model's routed experts, or None if its config has no experts."""
    text = config.get_text_config()

    def number(names: Sequence[str]) -> int:
        found = next((value for name in names if isinstance(value := getattr(text, name, None), int)), 0)
        return max(found, 0)

    sizes = (text.num_hidden_layers, number(NUM_EXPERTS), number(NUM_PER_TOKEN))
    if not all(sizes):
        return None
    return RoutingShape(num_layers=sizes[0], num_experts=sizes[1], num_per_token=sizes[2])


def lay_out(pack: Pack, experts_B: Sequence[np.ndarray | None]) -> Routing | None:
    """Return the routing of a pack, or None if no sequence has any.

    `experts_B` has the experts of each sequence's tokens, the prompt first. Later tokens may be missing. Of sequences
    that share a token, the first one that has its experts decides.
    """
    known = [experts for experts in experts_B if experts is not None]
    if not known:
        return None
    experts_NLK = np.full((pack.num_tokens, *known[0].shape[1:]), OWN, np.int16)
    is_unknown_N = np.ones(pack.num_tokens, bool)
    for path, experts in zip(pack.paths_B, experts_B, strict=True):
        if experts is None:
            continue
        for segment in path:
            given = experts[segment.position : segment.position + segment.length]
            rows = segment.rows[: len(given)][is_unknown_N[segment.start : segment.start + len(given)]]
            experts_NLK[rows] = given[rows - segment.start]
            is_unknown_N[rows] = False
    return Routing(experts_NLK=torch.from_numpy(experts_NLK))


@contextmanager
def replayed(model: Any, pack: Pack, routing: Routing | None, *, is_packed: bool) -> Iterator[None]:
    """Let the routers of the next pass over `pack` choose by `routing`, or by themselves if it is None.

    Raises:
        RuntimeError: A layer's router did not choose for the tokens of the pack.
    """
    if routing is None:
        yield
        return
    known, experts_NLK = routers[model], routing.experts_NLK.to(pack.token_ids_N.device)
    rows = (pack.read_R,) if is_packed else (pack.sequences()[0].flatten(),)
    by_length = {pack.num_tokens: experts_NLK} if is_packed else {}
    by_length |= {len(chosen): experts_NLK[chosen] for chosen in rows}
    replayed_layers: set[int] = set()

    def choose(layer: int, scores_SE: torch.Tensor, own: Any) -> Any:
        if not known.is_choice(scores_SE, own.indices):
            return own
        if len(scores_SE) not in by_length:
            raise RuntimeError(
                f"the router of layer {layer} chose experts for {len(scores_SE)} tokens, expected one of "
                f"{sorted(by_length)}; set learner.routing_replay = false"
            )
        given_SK = by_length[len(scores_SE)][:, layer].long()
        chosen_SK = torch.where(given_SK == OWN, own.indices, given_SK)
        replayed_layers.add(layer)
        routing.num_choices += len(chosen_SK)
        routing.num_changed += (chosen_SK.sort(1).values != own.indices.sort(1).values).any(1).sum()
        return torch.return_types.topk((scores_SE.gather(1, chosen_SK), chosen_SK))

    with routed_by(layers_of(model), choose):
        yield
    if replayed_layers != known.layers:
        raise RuntimeError(
            f"the routers of layers {sorted(known.layers - replayed_layers)} did not replay the server's choice; set "
            "learner.routing_replay = false"
        )


@contextmanager
def routed_by(layers: list[nn.Module], choose: Choose) -> Iterator[None]:
    """Let `choose` see and replace what topk returns in these layers."""
    token = _in_this_pass.set((layers, choose))
    before = [layer._compiled_call_impl for layer in layers]
    try:
        for number, (layer, call) in enumerate(zip(layers, before, strict=True)):
            layer._compiled_call_impl = _choosing(call or layer._call_impl, number, choose)  # as in logprobs.py
        yield
    finally:
        for layer, call in zip(layers, before, strict=True):
            layer._compiled_call_impl = call
        _in_this_pass.reset(token)


def routed_again() -> AbstractContextManager[None]:
    """Return the context in which the backward pass computes a layer of the current pass again."""
    current = _in_this_pass.get()
    return routed_by(*current) if current else nullcontext()


def _choosing(call: Callable[..., Any], number: int, choose: Choose) -> Callable[..., Any]:
    def choosing(*args: Any, **kwargs: Any) -> Any:
        with _ChoiceMode(number, choose):
            return call(*args, **kwargs)

    return choosing


class _ChoiceMode(TorchFunctionMode):
    """Pass each result of topk to `choose`."""

    def __init__(self, number: int, choose: Choose) -> None:
        super().__init__()
        self._number, self._choose = number, choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk":
            return found
        return self._choose(self._number, args[0] if args else (kwargs or {})["input"], found)
