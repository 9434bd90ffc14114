"""Attention over the parts of a pack, exact: each part by a flash kernel, merged by log-sum-exp.

    softmax over a union of parts = Σ part · exp(lse(part) - lse(all)),   lse(all) = log Σ exp(lse(part))

The backward pass of a part needs nothing of the others but the merged output and the merged lse, so ordinary kernels serve there
too (FlashAttention-2, arXiv 2307.08691, §3.1). On CPUs; the kernels are those behind scaled_dot_product_attention.

Suffixes: N packed tokens, H heads, K key-value heads, D of a head; n stacked blocks, Q queries and R rows of a block,
m real queries of a stack.
"""

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from learner.forward.parts import Part, Rows

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Tree(NamedTuple):
    """Who sees whom, and the scale of the scores."""

    parts: list[Part]
    scale: float


class TreeAttention(torch.autograd.Function):
    """(q_NHD, k_NKD, v_NKD, sinks_H or None, tree) → out_NHD. Sinks are logits that take part without a value."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: torch.Tensor,
        k_NKD: torch.Tensor,
        v_NKD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        tree: Tree,
    ) -> torch.Tensor:
        dtype = torch.promote_types(q_NHD.dtype, torch.float32)
        out_NHD = torch.zeros_like(q_NHD, dtype=dtype)  # and so it stays where nothing is asked for
        lse_NH = q_NHD.new_full(q_NHD.shape[:2], -math.inf, dtype=dtype)
        for part in tree.parts:
            q, k, v = _blocks(q_NHD, part.queries), _blocks(k_NKD, part.keys), _blocks(v_NKD, part.keys)
            out, lse = _forward(q, k, v, 0.0, part.is_causal, attn_mask=part.bias(q.dtype), scale=tree.scale)
            _merge(out_NHD, lse_NH, _rows(out, part).to(dtype), _rows(lse.unsqueeze(3), part).squeeze(2), part)
        if sinks_H is not None:
            with_sinks_NH = torch.logaddexp(lse_NH, sinks_H.to(dtype))
            out_NHD *= (lse_NH - with_sinks_NH).exp_().unsqueeze(2)
            lse_NH = with_sinks_NH
        out_NHD = out_NHD.to(q_NHD.dtype)
        ctx.save_for_backward(q_NHD, k_NKD, v_NKD, sinks_H, out_NHD, lse_NH)
        ctx.tree = tree
        return out_NHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_NHD, k_NKD, v_NKD, sinks_H, out_NHD, lse_NH = ctx.saved_tensors
        grad_NHD = grad_NHD.contiguous()
        dq_NHD, dk_NKD, dv_NKD = (torch.zeros_like(x, dtype=lse_NH.dtype) for x in (q_NHD, k_NKD, v_NKD))
        for part in ctx.tree.parts:
            q, grad, out = (_blocks(x, part.queries) for x in (q_NHD, grad_NHD, out_NHD))
            k, v = _blocks(k_NKD, part.keys), _blocks(v_NKD, part.keys)
            lse = _blocks(lse_NH.unsqueeze(2), part.queries).squeeze(3)
            if part.is_real_nQ is not None:  # a repeated row would count twice in the gradients of its keys
                grad = grad * part.is_real_nQ[:, None, :, None]
            dq, dk, dv = _backward(
                grad, q, k, v, out, lse, 0.0, part.is_causal, attn_mask=part.bias(q.dtype), scale=ctx.tree.scale
            )
            put = dq_NHD.index_copy_ if part.is_first else dq_NHD.index_add_
            put(0, part.rows_m, _rows(dq, part).to(lse_NH.dtype))
            for total_NKD, d in ((dk_NKD, dk), (dv_NKD, dv)):
                total_NKD.index_add_(0, part.keys.at_nR.flatten(), d.transpose(1, 2).flatten(0, 1).to(lse_NH.dtype))
        dsinks_H = None
        if sinks_H is not None:
            weight_NH = (sinks_H.to(lse_NH.dtype) - lse_NH).exp_()
            dsinks_H = -(weight_NH * (grad_NHD * out_NHD).sum(dim=2)).sum(dim=0).to(sinks_H.dtype)
        dq_NHD, dk_NKD, dv_NKD = (d.to(q_NHD.dtype) for d in (dq_NHD, dk_NKD, dv_NKD))
        return dq_NHD, dk_NKD, dv_NKD, dsinks_H, None


def _merge(
    out_NHD: torch.Tensor, lse_NH: torch.Tensor, out_mHD: torch.Tensor, lse_mH: torch.Tensor, part: Part
) -> None:
    """Take what a part says of its m rows into what was known of them."""
    if not part.is_first:
        before_mHD, before_mH = out_NHD.index_select(0, part.rows_m), lse_NH.index_select(0, part.rows_m)
        both_mH = torch.logaddexp(before_mH, lse_mH)
        out_mHD = out_mHD * (lse_mH - both_mH).exp_().unsqueeze(2)
        out_mHD += before_mHD * (before_mH - both_mH).exp_().unsqueeze(2)
        lse_mH = both_mH
    out_NHD.index_copy_(0, part.rows_m, out_mHD)
    lse_NH.index_copy_(0, part.rows_m, lse_mH.to(lse_NH.dtype))


def _blocks(x_NHD: torch.Tensor, rows: Rows) -> torch.Tensor:
    """(n, H, R, D); a view where it can be."""
    num, length = rows.at_nR.shape
    if rows.first is not None:
        return x_NHD[rows.first : rows.first + length].transpose(0, 1).unsqueeze(0)
    return x_NHD.index_select(0, rows.at_nR.flatten()).view(num, length, *x_NHD.shape[1:]).transpose(1, 2)


def _rows(x_nHQD: torch.Tensor, part: Part) -> torch.Tensor:
    """(m, H, D), of the part's real queries."""
    x_mHD = x_nHQD.transpose(1, 2).flatten(0, 1)
    return x_mHD if part.real_m is None else x_mHD.index_select(0, part.real_m)
