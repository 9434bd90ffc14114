"""Attention over the parts of a pack, exact: each part by a flash kernel, merged by log-sum-exp.

    softmax over a union of parts = Σ part · exp(lse(part) - lse(all)),   lse(all) = log Σ exp(lse(part))

The backward pass of a part needs nothing of the others but the merged output and the merged lse, so ordinary kernels serve there
too (FlashAttention-2, arXiv 2307.08691, §3.1). On CPUs; the kernels are those behind scaled_dot_product_attention.

Suffixes: N packed tokens, H heads, K key-value heads, D of a head; n stacked blocks, Q queries of a block; M queries of all parts,
R of a chunk of them.
"""

import math
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from learner.forward.parts import Plan

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Tree(NamedTuple):
    """Who sees whom, and the scale of the scores."""

    plan: Plan
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
        plan, scale = tree
        outs, lses = [], []
        for chunk in plan.chunks:
            queries, keys = chunk.queries, chunk.keys
            blocks = zip(chunk.parts, queries.of(q_NHD), keys.of(k_NKD), keys.of(v_NKD), strict=True)
            for part, q, k, v in blocks:
                out, lse = _forward(q, k, v, 0.0, part.is_causal, attn_mask=part.bias(q.dtype), scale=scale)
                outs.append(_rows(out))
                lses.append(_rows(lse))
        lse_MH = torch.cat(lses).index_fill_(0, plan.repeated_P, -math.inf)
        lse_NH = _total(lse_MH, plan.rows_M, len(q_NHD))
        if sinks_H is not None:
            lse_NH = torch.logaddexp(lse_NH, sinks_H.to(lse_NH.dtype))
        share_MH = (lse_MH - lse_NH.index_select(0, plan.rows_M)).exp_()
        out_MHD = torch.cat(outs).to(lse_NH.dtype).mul_(share_MH.unsqueeze(2))
        out_NHD = lse_NH.new_zeros(q_NHD.shape).index_add_(0, plan.rows_M, out_MHD).to(q_NHD.dtype)
        ctx.save_for_backward(q_NHD, k_NKD, v_NKD, sinks_H, out_NHD, lse_NH)
        ctx.tree = tree
        return out_NHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_NHD, k_NKD, v_NKD, sinks_H, out_NHD, lse_NH = ctx.saved_tensors
        plan, scale = ctx.tree
        grad_NHD = grad_NHD.contiguous()
        totals = tuple(lse_NH.new_zeros(x.shape) for x in (q_NHD, k_NKD, v_NKD))
        # Of its own lse a repeated row would have counted twice; beside an infinite one it is nothing.
        lse_MH = lse_NH.index_select(0, plan.rows_M).index_fill_(0, plan.repeated_P, math.inf)
        lses = lse_MH.split([len(chunk.queries.at_R) for chunk in plan.chunks])
        for chunk, lse_RH in zip(plan.chunks, lses, strict=True):
            queries, keys = chunk.queries, chunk.keys
            of_queries = (*map(queries.of, (grad_NHD, q_NHD, out_NHD)), queries.stacked(lse_RH))
            found = []
            for part, grad, q, out, lse, k, v in zip(
                chunk.parts, *of_queries, keys.of(k_NKD), keys.of(v_NKD), strict=True
            ):
                bias = part.bias(q.dtype)
                d_blocks = _backward(grad, q, k, v, out, lse, 0.0, part.is_causal, attn_mask=bias, scale=scale)
                found.append(map(_rows, d_blocks))
            for total, rows, d in zip(totals, (queries, keys, keys), zip(*found, strict=True), strict=True):
                total.index_add_(0, rows.at_R, torch.cat(d).to(total.dtype))
        dsinks_H = None
        if sinks_H is not None:
            weight_NH = (sinks_H.to(lse_NH.dtype) - lse_NH).exp_()
            dsinks_H = -(weight_NH * (grad_NHD * out_NHD).sum(dim=2)).sum(dim=0).to(sinks_H.dtype)
        return *(total.to(q_NHD.dtype) for total in totals), dsinks_H, None


def _total(lse_MH: torch.Tensor, rows_M: torch.Tensor, num_rows: int) -> torch.Tensor:
    """lse_NH: what all parts know of each of the N rows; -inf where none knows anything."""
    none_NH = lse_MH.new_full((num_rows, lse_MH.shape[1]), -math.inf)
    top_NH = none_NH.scatter_reduce(0, rows_M.unsqueeze(1).expand_as(lse_MH), lse_MH, "amax")
    sum_NH = torch.zeros_like(top_NH).index_add_(0, rows_M, (lse_MH - top_NH.index_select(0, rows_M)).exp_())
    return top_NH + sum_NH.log_()


def _rows(x_nHQD: torch.Tensor) -> torch.Tensor:
    """(n · Q, H, D), or without a D."""
    return x_nHQD.transpose(1, 2).flatten(0, 1)
