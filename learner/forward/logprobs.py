"""The logprobs that a policy gives to the tokens of a pack.

    Pack ─▶ trunk.py ─▶ hidden states that predict ─▶ head.py ─▶ logprobs_BT, entropy_BT: a row for each completion

The model is called as a whole, so what wraps it (DDP, FSDP2, an adapter) sees an ordinary pass; its head computes a single row, and
what the head was to have is taken from it.

Suffixes: M predicted tokens, B completions, T tokens of the longest completion, S tokens of a row that the pass computes,
E hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from learner.forward.head import EntropyUse, HeadLogprobs, Reading
from learner.forward.logit_map import logit_map_of
from learner.forward.pack import Pack, pack
from learner.forward.tile import PLAIN, LogitMap, Tiles
from learner.forward.trunk import predicting_rows, run_model

Answer = tuple[torch.Tensor, torch.Tensor | None]

logit_maps: WeakKeyDictionary[nn.Module, LogitMap] = WeakKeyDictionary()
"""Of models that have had a pass; found out by a pass of its own, which all ranks of a sharded model would have to make."""
tiles_of: WeakKeyDictionary[nn.Module, Tiles] = WeakKeyDictionary()
"""Of models whose head is fused (fused.py)."""
float32_heads: WeakSet[nn.Module] = WeakSet()
"""Models that compute in bfloat16, but for their logits (`head_dtype`)."""


def token_logprobs(model: nn.Module, batch: Pack, temperature: float, *, entropy: EntropyUse = "none") -> Answer:
    """Return (logprobs_BT, entropy_BT) of the completions' tokens at `temperature`; without entropy None in its place.

    All ranks call it together if the policy is sharded. Raises ConfigError for a model whose logits it cannot compute.
    """
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    if inner not in logit_maps:
        logit_maps[inner] = logit_map_of(inner)
    reading = Reading(
        logit_maps[inner], temperature, entropy, tiles_of.get(inner, PLAIN), in_float32=inner in float32_heads
    )

    def of_hidden(hidden_ME: torch.Tensor) -> Answer:
        weight_VE, bias_V = _weight_and_bias(inner.get_output_embeddings(), hidden_ME.dtype)
        return HeadLogprobs.apply(hidden_ME, weight_VE, bias_V, batch.targets_M, reading)

    with _answering(inner, predicting_rows(inner, batch), of_hidden):
        logprobs_M, entropy_M = run_model(model, inner, batch)
    return batch.unpacked(logprobs_M), None if entropy_M is None else batch.unpacked(entropy_M)


@torch.no_grad()
def sequences_logprobs(model: nn.Module, sequences: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return the logprobs of each sequence's tokens after its first, one sequence after the other, on the CPU; by one pass."""
    ids = [np.array(sequence) for sequence in sequences]
    batch = pack([(one[:1], [one[1:]]) for one in ids], device)
    logprobs_BT, _ = token_logprobs(model, batch, 1.0)
    return logprobs_BT[batch.is_token_BT].cpu()


@contextmanager
def _answering(inner: Any, predicting_M: torch.Tensor, of_hidden: Callable[[torch.Tensor], Answer]) -> Iterator[None]:
    """Let a pass return `of_hidden` of the hidden states that predict, instead of logits: inside the pass, where the weights of a
    sharded policy are whole and its hooks see what is returned.
    """
    taken: list[torch.Tensor] = []

    def take(_head: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        taken.append(inputs[0])
        return (inputs[0][:1, :1], *inputs[1:])

    def answer(*_: object) -> Answer:
        (hidden_BSE,) = taken
        return of_hidden(hidden_BSE.flatten(0, 1).index_select(0, predicting_M))

    hooks = [
        inner.get_output_embeddings().register_forward_pre_hook(take),
        inner.register_forward_hook(answer, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _weight_and_bias(head: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of the head, an adapter on it added; in the dtype of what comes to it, as the other layers have theirs."""
    adapters = head.active_adapters if isinstance(head, BaseTunerLayer) else ()
    linear = head.get_base_layer() if adapters else head
    weight_VE = linear.weight
    for name in adapters:
        weight_VE = weight_VE + head.get_delta_weight(name)
    return weight_VE.to(dtype), None if linear.bias is None else linear.bias.to(dtype)
