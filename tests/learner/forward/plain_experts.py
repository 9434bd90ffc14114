"""Mixture-of-experts layers written as loops over experts, with the experts of each token given from outside."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear, silu

Chosen = np.ndarray
"""Experts by token, layer and rank of the choice; -1: the router chooses."""


def weights_of(family: str, block: Any, x_SE: torch.Tensor, given_SK: torch.Tensor) -> torch.Tensor:
    """Return the weight of each expert for each token, 0 if it is not chosen."""
    router = block.router if family == "gpt_oss" else block.gate
    logits = linear(x_SE, router.weight, getattr(router, "bias", None)).float()
    by_itself = logits.sort(dim=1, descending=True).indices[:, : given_SK.shape[1]]
    given_SK = torch.where(given_SK < 0, by_itself, given_SK)
    is_chosen = torch.zeros_like(logits, dtype=torch.bool)
    for rank in range(given_SK.shape[1]):
        is_chosen[torch.arange(len(logits)), given_SK[:, rank]] = True
    # In all three families, the weights of the chosen experts are the softmax of their logits.
    return logits.masked_fill(~is_chosen, -torch.inf).softmax(1)


def expert_of(family: str, block: Any, number: int, x_SE: torch.Tensor) -> torch.Tensor:
    experts = block.experts
    if family == "gpt_oss":
        both = x_SE @ experts.gate_up_proj[number] + experts.gate_up_proj_bias[number]
        gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return inner @ experts.down_proj[number] + experts.down_proj_bias[number]
    gate, up = linear(x_SE, experts.gate_up_proj[number]).chunk(2, dim=1)
    return linear(silu(gate) * up, experts.down_proj[number])


@contextmanager
def plain_experts(family: str, model: Any, chosen_SLK: Chosen) -> Iterator[None]:
    """Let a model compute one sequence with these experts. Later tokens choose their own."""

    def forward_of(block: Any, layer: int) -> Any:
        def forward(hidden_1SE: torch.Tensor) -> Any:
            x_SE = hidden_1SE[0]
            given_SK = torch.full((len(x_SE), chosen_SLK.shape[2]), -1)
            given_SK[: len(chosen_SLK)] = torch.from_numpy(chosen_SLK[:, layer].astype(np.int64))
            weights_SX = weights_of(family, block, x_SE, given_SK)
            out = sum(weights_SX[:, e, None] * expert_of(family, block, e, x_SE) for e in range(weights_SX.shape[1]))
            return (out[None], None) if family == "gpt_oss" else out[None]

        return forward

    blocks = [layer.mlp for layer in model.model.layers]
    for number, block in enumerate(blocks):
        block.forward = forward_of(block, number)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
