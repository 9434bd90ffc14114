"""The kernel of a GPU spelt out for a CPU, segment after segment: plain, and as an operator that torch compiles around.

like_a_gpu    the way of a GPU: whole layers, and keys laid out for them
trace_only    what is compiled is traced as always, but not turned into code, which would take a minute for each model
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from learner.forward import attention, compile
from learner.forward.attention import KeyLayout, is_packed, key_layout, layers_of


def segments(
    q_NHD, k_LKD, v_LKD, first_queries: torch.Tensor, first_keys: torch.Tensor, window: int, scale: float
) -> Iterator[Any]:
    """Of each: its rows of queries and of keys, its queries, keys and values by head, and their weights_HQC."""
    groups = q_NHD.shape[1] // k_LKD.shape[1]
    for (q0, q1), (k0, k1) in zip(pairwise(first_queries.tolist()), pairwise(first_keys.tolist()), strict=True):
        q_HQD = q_NHD[q0:q1].transpose(0, 1)
        k_HCD, v_HCD = (x[k0:k1].transpose(0, 1).repeat_interleave(groups, dim=0) for x in (k_LKD, v_LKD))
        behind_QC = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)
        is_seen_QC = (behind_QC >= 0) & (behind_QC < window)
        scores_HQC = (scale * q_HQD @ k_HCD.mT).masked_fill(~is_seen_QC, -torch.inf)
        yield slice(q0, q1), slice(k0, k1), q_HQD, k_HCD, v_HCD, scores_HQC.softmax(-1)


def attend(
    q_NHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, first_queries: torch.Tensor,
    first_keys: torch.Tensor,
    max_queries: int, max_keys: int, window: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """What torch's variable-length kernel does on a GPU, segment after segment."""
    found = segments(q_NHD, k_LKD, v_LKD, first_queries, first_keys, window, scale)
    return torch.cat([(weights_HQC @ v_HCD).transpose(0, 1) for *_, v_HCD, weights_HQC in found])


kernel = torch.library.custom_op("slipstream_tests::kernel", attend, mutates_args=())


@kernel.register_fake
def _(q_NHD, *_: Any) -> torch.Tensor:
    return torch.empty_like(q_NHD)


@torch.library.custom_op("slipstream_tests::kernel_backward", mutates_args=())
def kernel_backward(
    grad_NHD: torch.Tensor, q_NHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, first_queries: torch.Tensor,
    first_keys: torch.Tensor, window: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dq_NHD, dk_LKD, dv_LKD = (torch.zeros_like(x) for x in (q_NHD, k_LKD, v_LKD))

    def by_key_head(d_HCD: torch.Tensor) -> torch.Tensor:
        return d_HCD.unflatten(0, (k_LKD.shape[1], -1)).sum(1).transpose(0, 1)

    for rows, keys, q_HQD, k_HCD, v_HCD, weights_HQC in segments(
        q_NHD, k_LKD, v_LKD, first_queries, first_keys, window, scale
    ):
        grad_HQD = grad_NHD[rows].transpose(0, 1)
        by_weight_HQC = grad_HQD @ v_HCD.mT
        by_score_HQC = weights_HQC * (by_weight_HQC - (by_weight_HQC * weights_HQC).sum(-1, keepdim=True))
        dq_NHD[rows] = scale * (by_score_HQC @ k_HCD).transpose(0, 1)
        dk_LKD[keys] = by_key_head(scale * by_score_HQC.mT @ q_HQD)
        dv_LKD[keys] = by_key_head(weights_HQC.mT @ grad_HQD)
    return dq_NHD, dk_LKD, dv_LKD


@kernel_backward.register_fake
def _(grad_NHD, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.window_and_scale = inputs[7:]


def _backward(ctx: Any, grad_NHD: torch.Tensor) -> tuple[Any, ...]:
    return *kernel_backward(grad_NHD, *ctx.saved_tensors, *ctx.window_and_scale), None, None, None, None, None, None


kernel.register_autograd(_backward, setup_context=_keep)


def on_kernel(
    q_NHD, k_NKD, v_NKD, layout: KeyLayout, window: int | None, scale: float,
    kernel: Callable[..., torch.Tensor] = kernel
) -> torch.Tensor:  # fmt: skip
    """In place of the pass's own function for a GPU."""
    k_LKD, v_LKD = (x.index_select(0, layout.rows_L) for x in (k_NKD, v_NKD))
    starts = (layout.first_queries, layout.first_keys, layout.max_queries, layout.max_keys)
    return kernel(q_NHD, k_LKD, v_LKD, *starts, window or 1 << 40, scale)


def like_a_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "_keys_of", key_layout)
    patch.setattr(attention, "varlen_attention", on_kernel)
    patch.setattr(compile, "_whole_layers", lambda model: layers_of(model)[:-1] if is_packed(model) else [])


def trace_only(patch: pytest.MonkeyPatch, backend: Any = "aot_eager") -> None:
    patch.setattr(torch, "compile", partial(_traced_only, torch.compile, backend))


def _traced_only(
    compile: Callable[..., Any], backend: Any, function: Any, *, options: dict[str, Any], **how: Any
) -> Any:
    return compile(function, backend=backend, **how)
