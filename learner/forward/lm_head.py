"""Compute logprobs and entropies from hidden states, in tiles of rows × vocabulary.

    hidden_ME, weight_VE ─▶ products, one tile each ─▶ tile.py ─▶ max, Σ exp, Σ exp · z, z of the target
                         ─▶ logprobs_M, entropy_M

Invariant: no (M, V) tensor exists. The backward pass recomputes the tiles from two stored numbers per row.
torch's linear_cross_entropy has neither entropy nor soft cap, and was 3 % faster at best. Liger's has no
entropy, and had wrong gradients of the head for per-token losses until its pull request 1298.

Suffixes: M predicted tokens, E hidden size, V vocabulary; m, v rows and columns of a tile.
"""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from learner.forward.tile import PLAIN, LogitMap, Numbers, RowGradients, Tiles, no_sums

EntropyUse = Literal["none", "value", "gradient"]
"""Use of the entropy by the caller."""
TILE_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 27}
TILE_COLUMNS = 8192


class LogprobSettings(msgspec.Struct, frozen=True):
    """Settings for reading logits and for computing logprobs and entropy."""

    logit_map: LogitMap
    temperature: float
    entropy: EntropyUse
    tiles: Tiles = PLAIN
    in_float32: bool = False
    """Whether products of bfloat16 inputs stay in float32 instead of being rounded to bfloat16."""

    @property
    def numbers(self) -> Numbers:
        return Numbers(self.logit_map.scale, self.logit_map.cap, self.temperature)


class HeadLogprobs(torch.autograd.Function):
    """Autograd function for logprobs and entropies of the head's logits.

        (hidden_ME, weight_VE, bias_V or None, targets_M, settings) → (logprobs_M, entropy_M)

    The distribution is the softmax of map(hidden weightᵀ + bias) / temperature, in float32. The product is in
    the weights' dtype, as on the server, unless `settings.in_float32`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: torch.Tensor,
        weight_VE: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_M: torch.Tensor,
        settings: LogprobSettings,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_rows, num_columns = len(hidden_ME), len(weight_VE)
        dtype = torch.promote_types(hidden_ME.dtype, torch.float32)
        logprobs_M, lse_M = (hidden_ME.new_empty(num_rows, dtype=dtype) for _ in range(2))
        entropy_M = None if settings.entropy == "none" else torch.empty_like(lse_M)
        for rows in _rows(hidden_ME, num_columns):
            sums = no_sums(rows.stop - rows.start, hidden_ME.device, dtype)
            for columns in _columns(num_columns):
                product_mv = _product(hidden_ME[rows], weight_VE, bias_V, columns, settings)
                targets_m1 = (targets_M[rows] - columns.start).unsqueeze(1)
                sums = settings.tiles.sums(
                    product_mv, targets_m1, sums, settings.numbers, with_entropy=entropy_M is not None
                )
                del product_mv  # otherwise it would coexist with the next tile
            lse_M[rows] = (sums.top_m1 + sums.total_m1.log()).squeeze(1)
            logprobs_M[rows] = sums.target_m1.squeeze(1) - lse_M[rows]
            if entropy_M is not None:
                entropy_M[rows] = (sums.total_m1.log() - sums.weighed_m1 / sums.total_m1).squeeze(1)
        ctx.save_for_backward(hidden_ME, weight_VE, bias_V, targets_M, lse_M, entropy_M)
        ctx.settings = settings
        if settings.entropy == "value":
            ctx.mark_non_differentiable(entropy_M)
        return logprobs_M, entropy_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: torch.Tensor, entropy_grad_M: torch.Tensor | None) -> tuple[Any, ...]:
        hidden_ME, weight_VE, bias_V, targets_M, lse_M, entropy_M = ctx.saved_tensors
        leaves = (hidden_ME, weight_VE, bias_V)
        d_hidden_ME, d_weight_VE, d_bias_V = (
            torch.zeros_like(leaf, dtype=lse_M.dtype) if is_needed and leaf is not None else None
            for leaf, is_needed in zip(leaves, ctx.needs_input_grad, strict=False)
        )
        for rows in _rows(hidden_ME, len(weight_VE)):
            hidden_mE, grad_m1 = hidden_ME[rows], grad_M[rows].unsqueeze(1)
            of_rows = RowGradients(lse_M[rows].unsqueeze(1), grad_m1)
            if ctx.settings.entropy == "gradient" and entropy_grad_M is not None:
                of_entropy = (x_M.detach()[rows].unsqueeze(1) for x_M in (entropy_M, entropy_grad_M))
                of_rows = RowGradients(*of_rows[:2], *of_entropy)
            for columns in _columns(len(weight_VE)):
                product_mv = _product(hidden_mE, weight_VE, bias_V, columns, ctx.settings)
                targets_m1 = (targets_M[rows] - columns.start).unsqueeze(1)
                d_product_mv = ctx.settings.tiles.gradient(product_mv, targets_m1, of_rows, ctx.settings.numbers)
                if d_hidden_ME is not None:
                    _add_product(d_hidden_ME[rows], d_product_mv, weight_VE[columns])
                if d_weight_VE is not None:
                    _add_product(d_weight_VE[columns], d_product_mv.T, hidden_mE)
                if d_bias_V is not None:
                    d_bias_V[columns] += d_product_mv.sum(dim=0, dtype=d_bias_V.dtype)
                del product_mv, d_product_mv
        d_leaves = (d_hidden_ME, d_weight_VE, d_bias_V)
        cast = (None if d is None else d.to(leaf.dtype) for d, leaf in zip(d_leaves, leaves, strict=True))
        return *cast, None, None


def _product(
    hidden_mE: torch.Tensor,
    weight_VE: torch.Tensor,
    bias_V: torch.Tensor | None,
    columns: slice,
    settings: LogprobSettings,
) -> torch.Tensor:
    weight_vE, bias_v = weight_VE[columns], None if bias_V is None else bias_V[columns]
    if not settings.in_float32 or hidden_mE.dtype == torch.float32:
        return nn.functional.linear(hidden_mE, weight_vE, bias_v)
    if hidden_mE.device.type != "cuda":
        return nn.functional.linear(hidden_mE.float(), weight_vE.float(), None if bias_v is None else bias_v.float())
    # The inputs stay bfloat16, so this is as fast as a bfloat16 product.
    product_mv = torch.mm(hidden_mE, weight_vE.T, out_dtype=torch.float32)
    return product_mv if bias_v is None else product_mv.add_(bias_v)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a product to `total`, which accumulates products of bfloat16 in float32."""
    if left.dtype == right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left.to(right.dtype) @ right)


def _rows(hidden_ME: torch.Tensor, num_columns: int) -> Iterator[slice]:
    count = max(1, TILE_LOGITS[hidden_ME.device.type] // min(num_columns, TILE_COLUMNS))
    return (slice(first, min(len(hidden_ME), first + count)) for first in range(0, len(hidden_ME), count))


def _columns(num_columns: int) -> Iterator[slice]:
    return (slice(first, min(num_columns, first + TILE_COLUMNS)) for first in range(0, num_columns, TILE_COLUMNS))
