"""What is done to a tile of logits between the products of lm_head.py: rows × columns of the vocabulary, as the head's product gave it.

    product_mv ─▶ tile_sums: of its rows        product_mv, what the whole rows came to ─▶ tile_gradient: of the loss by the product

Invariant: as they are, the two work in place and by pieces, so that no second tile exists; compiled, each is a pass or two over the
tile, whose intermediate numbers never reach the memory (on an H100 both together took 16 ms for what took 90). Both spoil what they
are given.

Suffixes: m, v rows and columns of a tile, c columns of a piece of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import msgspec
import torch

PIECE_COLUMNS = 1024
OPTIONS: dict[str, Any] = {"online_softmax": False}
"""With it Inductor warns at every start that it has thought better of it: the greatest number and the sums are two passes."""
KERNEL_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Of the greatest number: a rounding of the result."""


class LogitMap(msgspec.Struct, frozen=True):
    """What a model does to its head's output z: scale · z, or cap · tanh(scale · z / cap)."""

    scale: float = 1.0
    cap: float | None = None


class Numbers(NamedTuple):
    """What a logit is read with; plain, for compiled code."""

    scale: float
    cap: float | None
    temperature: float


class RowSums(NamedTuple):
    """Of z, the logits as they are read, over the columns seen: the greatest, Σ exp(z - top), Σ exp(z - top)(z - top), the target's."""

    top_m1: torch.Tensor
    total_m1: torch.Tensor
    weighed_m1: torch.Tensor
    target_m1: torch.Tensor


class RowGradients(NamedTuple):
    """What the backward pass has of a tile's rows: of the loss by log p and by the entropy, which two may be None together."""

    lse_m1: torch.Tensor
    grad_m1: torch.Tensor
    entropy_m1: torch.Tensor | None = None
    entropy_grad_m1: torch.Tensor | None = None


class Tiles(NamedTuple):
    """Both functions, as they are or compiled."""

    sums: Callable[..., RowSums]
    gradient: Callable[..., torch.Tensor]


def read(product_mv: torch.Tensor, numbers: Numbers) -> torch.Tensor:
    """z, in float32 or better: mapped, and divided by the temperature. In place, unless it changes the dtype."""
    scale, cap, temperature = numbers
    z_mv = product_mv.to(torch.promote_types(product_mv.dtype, torch.float32))
    if scale != 1:
        z_mv.mul_(scale)
    if cap is not None:
        z_mv.div_(cap).tanh_().mul_(cap)
    return z_mv if temperature == 1 else z_mv.div_(temperature)


def no_sums(num_rows: int, device: torch.device, dtype: torch.dtype) -> RowSums:
    """Before any column."""
    top_m1 = torch.full((num_rows, 1), torch.finfo(dtype).min, device=device, dtype=dtype)
    return RowSums(top_m1, *(torch.zeros_like(top_m1) for _ in range(3)))


def tile_sums(
    product_mv: torch.Tensor,
    targets_m1: torch.Tensor,
    before: RowSums,
    numbers: Numbers,
    *,
    with_entropy: bool,
) -> RowSums:
    """Over the columns before and these. `targets_m1`: of this tile's columns, or none of them. Without entropy the weighed sum is 0."""
    is_here_m1, at_m1 = _targets_in(targets_m1, product_mv)
    target_z_m1 = read(product_mv.gather(1, at_m1), numbers)
    z_mv = read(product_mv, numbers)
    top_m1 = torch.maximum(z_mv.amax(dim=1, keepdim=True), before.top_m1)
    shift_m1 = before.top_m1 - top_m1
    total_m1 = before.total_m1 * shift_m1.exp()
    weighed_m1 = (before.weighed_m1 + before.total_m1 * shift_m1) * shift_m1.exp()
    z_mv = z_mv.sub_(top_m1)
    if with_entropy:
        for z_mc in z_mv.split(_piece(z_mv), dim=1):  # so that exp z and z · exp z take no second tile
            exp_mc = z_mc.exp()
            total_m1 = total_m1 + exp_mc.sum(dim=1, keepdim=True)
            weighed_m1 = weighed_m1 + exp_mc.mul_(z_mc).sum(dim=1, keepdim=True)
    else:
        total_m1 = total_m1 + z_mv.exp_().sum(dim=1, keepdim=True)
    return RowSums(top_m1, total_m1, weighed_m1, before.target_m1 + torch.where(is_here_m1, target_z_m1, 0.0))


def tile_gradient(
    product_mv: torch.Tensor,
    targets_m1: torch.Tensor,
    rows: RowGradients,
    numbers: Numbers,
) -> torch.Tensor:
    """Of the loss by the product, in its place. d entropy / dz = -p (log p + entropy)."""
    _, grad_m1, entropy_m1, entropy_grad_m1 = rows
    z_mv = read(product_mv, numbers)
    slope = _slope(z_mv, numbers)
    logp_mv = z_mv.sub_(rows.lse_m1)
    if entropy_grad_m1 is None or entropy_m1 is None:
        dz_mv = logp_mv.exp_().mul_(-grad_m1)
    else:
        for logp_mc in logp_mv.split(_piece(logp_mv), dim=1):
            share_mc = (logp_mc + entropy_m1).mul_(entropy_grad_m1).add_(grad_m1)
            logp_mc.exp_().mul_(share_mc).neg_()
        dz_mv = logp_mv
    if torch.compiler.is_compiling():  # scattered, the tile would be written and read again
        is_target_mv = torch.arange(dz_mv.shape[1], device=dz_mv.device) == targets_m1
        dz_mv = dz_mv + torch.where(is_target_mv, grad_m1, 0.0)
    else:
        is_here_m1, at_m1 = _targets_in(targets_m1, product_mv)
        dz_mv.scatter_add_(1, at_m1, torch.where(is_here_m1, grad_m1, 0.0))
    return product_mv.copy_(dz_mv.mul_(slope))


PLAIN = Tiles(tile_sums, tile_gradient)


def fused_tiles() -> Tiles:
    """Compiled when they are called first."""
    sums, gradient = (torch.compile(function, dynamic=True, options=OPTIONS) for function in PLAIN)
    return Tiles(cast(Any, sums), cast(Any, gradient))


def tiles_problem(tiles: Tiles, device: torch.device, dtype: torch.dtype) -> str | None:
    """Whether they give other numbers than PLAIN; the entropy's gradient too."""
    generator = torch.Generator().manual_seed(0)
    product_mv = torch.randn(24, 1000, generator=generator).to(device, dtype)
    use_m1 = product_mv[:, :1].float()
    targets_m1 = torch.arange(24, device=device)[:, None] * 44  # the last is in no column

    def answers(tiles: Tiles) -> list[torch.Tensor]:
        as_they_are = Numbers(1.0, None, 1.0)
        sums = no_sums(24, device, torch.float32)
        for _ in range(2):
            sums = tiles.sums(product_mv.clone(), targets_m1, sums, as_they_are, with_entropy=True)
        lse_m1 = sums.top_m1 + sums.total_m1.log()
        entropy_m1 = sums.total_m1.log() - sums.weighed_m1 / sums.total_m1
        gradients = [RowGradients(lse_m1, use_m1), RowGradients(lse_m1, use_m1, entropy_m1, -use_m1)]
        return [*sums, *(tiles.gradient(product_mv.clone(), targets_m1, rows, as_they_are) for rows in gradients)]

    pairs = zip(answers(tiles), answers(PLAIN), strict=True)
    worst = max(
        float((found.float() - right.float()).abs().max() / right.float().abs().max()) for found, right in pairs
    )
    return None if worst <= KERNEL_TOLERANCE[dtype] else f"its head is off by {worst:.2g}"


def _targets_in(targets_m1: torch.Tensor, product_mv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(which targets lie in these columns, where: a column that exists in any case)."""
    last = product_mv.shape[1] - 1
    return (targets_m1 >= 0) & (targets_m1 <= last), targets_m1.clamp(0, last)


def _slope(z_mv: torch.Tensor, numbers: Numbers) -> torch.Tensor | float:
    """Of z by the product."""
    scale, cap, temperature = numbers
    slope = scale / temperature
    return slope if cap is None else (z_mv * (temperature / cap)).square_().neg_().add_(1).mul_(slope)


def _piece(z_mv: torch.Tensor) -> int:
    return z_mv.shape[1] if torch.compiler.is_compiling() else PIECE_COLUMNS
