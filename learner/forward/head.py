"""Logprobs and entropies from hidden states, in tiles of rows × vocabulary that the backward pass computes again.

    hidden_ME, weight_VE ─▶ tiles of logits ─▶ running max, Σ exp, Σ exp · z, z of the target ─▶ logprobs_M, entropy_M

Between the model's last layer and the loss. Invariant: no (M, V) tensor exists; what stays for the backward pass is two numbers a
row. torch's own linear_cross_entropy has no entropy and no soft cap, and was 3 % faster at best. Liger's has no entropy and, one
loss for each token as a policy gradient weighs them, had wrong gradients of the head until its pull request 1298.

Suffixes: M predicted tokens, E hidden size, V vocabulary; m, v rows and columns of a tile.
"""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.autograd.function import once_differentiable

EntropyUse = Literal["none", "value", "gradient"]
"""What the caller reads of the entropy."""
TILE_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}
TILE_COLUMNS = 8192
ENTROPY_COLUMNS = 1024


class LogitMap(msgspec.Struct, frozen=True):
    """What a model does to its head's output z: scale · z, or cap · tanh(scale · z / cap)."""

    scale: float = 1.0
    cap: float | None = None


class Reading(msgspec.Struct, frozen=True):
    """How logits are read: their map, the temperature of the softmax, and what is wanted of it beside logprobs."""

    logit_map: LogitMap
    temperature: float
    entropy: EntropyUse


class HeadLogprobs(torch.autograd.Function):
    """(hidden_ME, weight_VE, bias_V or None, targets_M, reading) → (logprobs_M, entropy_M).

    Of the softmax of map(hidden weightᵀ + bias) / temperature; in float32, the product in the weights' dtype as the server's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: torch.Tensor,
        weight_VE: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_M: torch.Tensor,
        reading: Reading,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_rows, num_columns = len(hidden_ME), len(weight_VE)
        dtype = torch.promote_types(hidden_ME.dtype, torch.float32)
        logprobs_M, lse_M = (hidden_ME.new_empty(num_rows, dtype=dtype) for _ in range(2))
        entropy_M = None if reading.entropy == "none" else torch.empty_like(lse_M)
        for rows in _rows(hidden_ME, num_columns):
            sums = RunningSums()
            for columns in _columns(num_columns):
                sums.see(
                    _logits(hidden_ME[rows], weight_VE, bias_V, columns, reading),
                    targets_M[rows] - columns.start,
                    with_entropy=entropy_M is not None,
                )
            lse_M[rows] = sums.top_m1.squeeze(1) + sums.total_m1.log().squeeze(1)
            logprobs_M[rows] = sums.target_m - lse_M[rows]
            if entropy_M is not None:
                entropy_M[rows] = (sums.total_m1.log() - sums.weighed_m1 / sums.total_m1).squeeze(1)
        ctx.save_for_backward(hidden_ME, weight_VE, bias_V, targets_M, lse_M, entropy_M)
        ctx.reading = reading
        if reading.entropy == "value":
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
        wants_entropy = ctx.reading.entropy == "gradient"
        for rows in _rows(hidden_ME, len(weight_VE)):
            hidden_mE, grad_m1 = hidden_ME[rows], grad_M[rows].unsqueeze(1)
            for columns in _columns(len(weight_VE)):
                z_mv = _logits(hidden_mE, weight_VE, bias_V, columns, ctx.reading)
                slope = _slope(z_mv, ctx.reading)
                logp_mv = z_mv.sub_(lse_M[rows].unsqueeze(1))
                if wants_entropy and entropy_grad_M is not None:
                    dz_mv = _spread(logp_mv, grad_m1, entropy_grad_M[rows].unsqueeze(1), entropy_M[rows].unsqueeze(1))
                else:
                    dz_mv = logp_mv.exp_().mul_(-grad_m1)
                is_here_m1, at_m1 = _targets_in(targets_M[rows] - columns.start, dz_mv)
                dz_mv.scatter_add_(1, at_m1, torch.where(is_here_m1, grad_m1, 0.0))
                low_mv = dz_mv.mul_(slope).to(hidden_mE.dtype)
                if d_hidden_ME is not None:
                    _add_product(d_hidden_ME[rows], low_mv, weight_VE[columns])
                if d_weight_VE is not None:
                    _add_product(d_weight_VE[columns], low_mv.T, hidden_mE)
                if d_bias_V is not None:
                    d_bias_V[columns] += dz_mv.sum(dim=0)
                del z_mv, logp_mv, dz_mv, low_mv  # before the next tile is made, or there would be two
        d_leaves = (d_hidden_ME, d_weight_VE, d_bias_V)
        cast = (None if d is None else d.to(leaf.dtype) for d, leaf in zip(d_leaves, leaves, strict=True))
        return *cast, None, None


class RunningSums:
    """Of the rows of a tile, over the columns seen: the greatest z, Σ exp(z - top), Σ exp(z - top)(z - top), z of the target."""

    def __init__(self) -> None:
        self.top_m1, self.total_m1, self.weighed_m1, self.target_m = (torch.zeros(()) for _ in range(4))
        self._has_seen = False

    def see(self, z_mv: torch.Tensor, targets_m: torch.Tensor, *, with_entropy: bool) -> None:
        """Spoils z_mv."""
        is_here_m1, at_m1 = _targets_in(targets_m, z_mv)
        target_m = torch.where(is_here_m1, z_mv.gather(1, at_m1), 0.0).squeeze(1)
        top_m1 = z_mv.amax(dim=1, keepdim=True)
        if self._has_seen:
            top_m1 = torch.maximum(top_m1, self.top_m1)
        z_mv.sub_(top_m1)
        total_m1, weighed_m1 = torch.zeros_like(top_m1), torch.zeros_like(top_m1)
        if with_entropy:
            for z_mc in z_mv.split(ENTROPY_COLUMNS, dim=1):  # so that exp z and z · exp z take no second tile
                exp_mc = z_mc.exp()
                total_m1 += exp_mc.sum(dim=1, keepdim=True)
                weighed_m1 += exp_mc.mul_(z_mc).sum(dim=1, keepdim=True)
        else:
            total_m1 = z_mv.exp_().sum(dim=1, keepdim=True)
        if self._has_seen:
            shift_m1 = self.top_m1 - top_m1
            weighed_m1 += (self.weighed_m1 + self.total_m1 * shift_m1) * shift_m1.exp()
            total_m1 += self.total_m1 * shift_m1.exp()
            target_m += self.target_m
        self.top_m1, self.total_m1, self.weighed_m1, self.target_m = top_m1, total_m1, weighed_m1, target_m
        self._has_seen = True


def _logits(
    hidden_mE: torch.Tensor, weight_VE: torch.Tensor, bias_V: torch.Tensor | None, columns: slice, reading: Reading
) -> torch.Tensor:
    """As they are read: mapped, and divided by the temperature."""
    bias_v = None if bias_V is None else bias_V[columns]
    z_mv = nn.functional.linear(hidden_mE, weight_VE[columns], bias_v)
    z_mv = z_mv.to(torch.promote_types(z_mv.dtype, torch.float32))
    scale, cap = reading.logit_map.scale, reading.logit_map.cap
    if scale != 1:
        z_mv.mul_(scale)
    if cap is not None:
        z_mv.div_(cap).tanh_().mul_(cap)
    return z_mv if reading.temperature == 1 else z_mv.div_(reading.temperature)


def _slope(z_mv: torch.Tensor, reading: Reading) -> torch.Tensor | float:
    """Of z by the head's output."""
    slope, cap = reading.logit_map.scale / reading.temperature, reading.logit_map.cap
    return slope if cap is None else (z_mv * (reading.temperature / cap)).square_().neg_().add_(1).mul_(slope)


def _spread(
    logp_mv: torch.Tensor, grad_m1: torch.Tensor, entropy_grad_m1: torch.Tensor, entropy_m1: torch.Tensor
) -> torch.Tensor:
    """In place: what every z but the target's gets of both gradients; d entropy / dz = -p (log p + entropy)."""
    for logp_mc in logp_mv.split(ENTROPY_COLUMNS, dim=1):
        share_mc = (logp_mc + entropy_m1).mul_(entropy_grad_m1).add_(grad_m1)
        logp_mc.exp_().mul_(share_mc).neg_()
    return logp_mv


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Products of bfloat16 are added up in float32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _targets_in(targets_m: torch.Tensor, z_mv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(which targets lie in these columns, where: a column that exists in any case)."""
    last = z_mv.shape[1] - 1
    targets_m1 = targets_m.unsqueeze(1)
    return (targets_m1 >= 0) & (targets_m1 <= last), targets_m1.clamp(0, last)


def _rows(hidden_ME: torch.Tensor, num_columns: int) -> Iterator[slice]:
    count = max(1, TILE_LOGITS[hidden_ME.device.type] // min(num_columns, TILE_COLUMNS))
    return (slice(first, min(len(hidden_ME), first + count)) for first in range(0, len(hidden_ME), count))


def _columns(num_columns: int) -> Iterator[slice]:
    return (slice(first, min(num_columns, first + TILE_COLUMNS)) for first in range(0, num_columns, TILE_COLUMNS))
