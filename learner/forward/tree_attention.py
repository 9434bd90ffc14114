"""Compute exact attention over a pack on CPUs, in blocks that ordinary kernels process without a mask.

    segments ─▶ squares (each with itself), rectangles (each with all that continues it) ─▶ Plan of Parts
    Plan ─▶ each part by a flash kernel ─▶ merged by log-sum-exp:
        softmax over a union of parts = Σ part · exp(lse(part) - lse(all)),   lse(all) = log Σ exp(lse(part))

Blocks of similar shape are stacked. Only sliding windows shorter than a sequence need masks. A part's
backward pass needs only the merged output and lse, so ordinary kernels compute it (FlashAttention-2, arXiv
2307.08691, §3.1).
Invariant: every visible (query, key) pair is in exactly one part.
Suffixes: n stacked blocks, Q queries and K keys of a block, R rows of stacks or of a chunk, M queries of all
parts, P repeated queries, N packed tokens, H heads, D head size. In attention tensors, K is key-value heads.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from learner.forward.pack import Pack, Segment

STACK_ROWS = 512
"""Target number of queries in a stack."""
CHUNK_ROWS = 16_384
"""Maximum number of queries and keys gathered at once, to limit the memory for many windows."""
WHOLE, HALVED, HALF_STEP = 128, 1024, 32
"""Squares above WHOLE and up to HALVED rows are halved. The kernel skips hidden keys only in steps of 512.

Halves are multiples of HALF_STEP, so that they stack.
"""
SHORT = 32
"""Maximum length of a prompt that is repeated in each completion's square. Its own block would cost more."""
BAND_ROWS = 256
"""Maximum queries of a masked block. Its mask has at most BAND_ROWS × (window + BAND_ROWS) entries."""
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Block(NamedTuple):
    """Rows and the keys that they see; without keys, they see each other causally."""

    queries: np.ndarray
    keys: np.ndarray | None
    num_repeated: int = 0
    """Number of leading queries that belong to another block."""

    @property
    def num_keys(self) -> int:
        return 0 if self.keys is None else len(self.keys)


class Band(NamedTuple):
    """Position of a sliding window in a block of consecutive queries and keys."""

    first_query: int
    first_key: int
    window: int


class TreePart(NamedTuple):
    """A stack of blocks of one shape.

    A shorter block repeats its last row as a query, without effect. Stacking wins because a call costs more
    than a few idle rows.
    """

    queries_nQ: np.ndarray
    keys_nK: np.ndarray
    is_repeated_nQ: np.ndarray
    is_causal: bool = False
    band: Band | None = None

    def bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a mask (1, 1, Q, K) with -inf where the window hides a key.

        Returns None if nothing is hidden.
        """
        if self.band is None:
            return None
        queries_Q1 = self.band.first_query + torch.arange(self.queries_nQ.shape[1]).unsqueeze(1)
        keys_K = self.band.first_key + torch.arange(self.keys_nK.shape[1])
        is_hidden_QK = (keys_K > queries_Q1) | (keys_K <= queries_Q1 - self.band.window)
        return torch.zeros(is_hidden_QK.shape, dtype=dtype).masked_fill_(is_hidden_QK, -math.inf)[None, None]


class Rows:
    """Rows that several stacks of blocks take from a tensor with one row per token."""

    def __init__(self, stacks: Sequence[np.ndarray]) -> None:
        self.shapes = [stack.shape for stack in stacks]
        self.sizes = [stack.size for stack in stacks]
        rows_R = np.concatenate([stack.flatten() for stack in stacks])
        self.at_R = torch.from_numpy(rows_R)
        self._first = int(rows_R[0]) if (np.diff(rows_R) == 1).all() else None

    def of(self, x_NHD: torch.Tensor) -> list[torch.Tensor]:
        """Return (n, H, R, D) for each stack, as views if the rows are consecutive."""
        x_RHD = x_NHD.index_select(0, self.at_R) if self._first is None else x_NHD[self._first :][: len(self.at_R)]
        return self.stacked(x_RHD)

    def stacked(self, x_RHD: torch.Tensor) -> list[torch.Tensor]:
        """Return (n, H, R, D) for each stack from rows that are already gathered."""
        parts = zip(x_RHD.split(self.sizes), self.shapes, strict=True)
        return [x.unflatten(0, shape).transpose(1, 2) for x, shape in parts]


class Chunk:
    """Parts whose rows are gathered at once.

    A call for each part would cost as much as the few rows that it gathers.
    """

    def __init__(self, parts: Sequence[TreePart]) -> None:
        self.parts = parts
        self.queries, self.keys = Rows([part.queries_nQ for part in parts]), Rows([part.keys_nK for part in parts])


class TreePlan:
    """All parts of a pack, whose M queries are concatenated."""

    def __init__(self, parts: Iterable[TreePart]) -> None:
        self.chunks = [Chunk(few) for few in _few(parts)]
        self.rows_M = torch.cat([chunk.queries.at_R for chunk in self.chunks])
        is_repeated_M = np.concatenate([part.is_repeated_nQ.flatten() for part in self.parts])
        self.repeated_P = torch.from_numpy(np.flatnonzero(is_repeated_M))
        """Indices of the repeated queries among the M."""

    @property
    def parts(self) -> list[TreePart]:
        return [part for chunk in self.chunks for part in chunk.parts]


def plan_of(pack: Pack, window: int | None, *, predicting_only: bool = False) -> TreePlan:
    """Return the plan of a pack and a window, which is computed once.

    With `predicting_only`, queries that do not predict may be left out.
    """
    key = (window, predicting_only)
    if key not in pack.plans:
        longest = max(sum(segment.length for segment in path) for path in pack.paths_B)
        if window is not None and longest > window:
            parts: Iterable[TreePart] = _bands(pack, window)
        else:
            parts = _stacked(_predicting(pack) if predicting_only else _blocks(pack.segments))
        pack.plans[key] = TreePlan(parts)
    return cast(TreePlan, pack.plans[key])


def _few(parts: Iterable[TreePart]) -> Iterator[list[TreePart]]:
    few: list[TreePart] = []
    num_rows = 0
    for part in parts:
        more = part.queries_nQ.size + part.keys_nK.size
        if few and num_rows + more > CHUNK_ROWS:
            yield few
            few, num_rows = [], 0
        few.append(part)
        num_rows += more
    yield few


def _predicting(pack: Pack) -> Iterator[Block]:
    """Yield the blocks without queries that predict nothing, where that is possible.

    Only the last row of a prompt's square may remain.
    """
    blocks = list(_blocks(pack.segments))
    is_read_N = np.zeros(pack.num_tokens, bool)
    is_read_N[pack.read_R.numpy()] = True
    for block in blocks:  # a row that is only repeated would have no lse
        is_read_N[block.queries[: block.num_repeated]] = True
    for block in blocks:
        read = block.queries[is_read_N[block.queries]]
        if block.keys is not None and len(read):
            yield Block(read, block.keys)
        elif len(read) == 1 and read[0] == block.queries[-1]:
            yield Block(read, block.queries)
        elif len(read):
            yield block


def _blocks(segments: Sequence[Segment]) -> Iterator[Block]:
    """Yield blocks that pair every row with itself and all rows before it."""
    for root, rest in _trees(segments):
        if rest and root.length <= SHORT and all(segment.continued_until == segment.end for segment in rest):
            for i, leaf in enumerate(rest):
                yield from _square(np.concatenate([root.rows, leaf.rows]), root.length if i else 0)
        else:
            for segment in (root, *rest):
                yield from _square(segment.rows)
                if segment.length and segment.continued_until > segment.end:
                    yield Block(np.arange(segment.end, segment.continued_until), segment.rows)


def _trees(segments: Sequence[Segment]) -> Iterator[tuple[Segment, Sequence[Segment]]]:
    """Yield each root and everything that continues it."""
    roots = [i for i, segment in enumerate(segments) if not segment.position]
    for i, end in itertools.pairwise([*roots, len(segments)]):
        yield segments[i], segments[i + 1 : end]


def _square(rows: np.ndarray, num_repeated: int = 0) -> Iterator[Block]:
    """Yield blocks that pair rows causally with each other.

    A square is halved while the kernel would compute the hidden part of it too.
    """
    if WHOLE < len(rows) <= HALVED:
        middle = -(-len(rows) // (2 * HALF_STEP)) * HALF_STEP
        yield from _square(rows[:middle], num_repeated)
        yield from _square(rows[middle:])
        yield Block(rows[middle:], rows[:middle])
    elif len(rows) > num_repeated:
        yield Block(rows, None, num_repeated)


def _bands(pack: Pack, window: int) -> Iterator[TreePart]:
    seen: set[Segment] = set()
    for path in pack.paths_B:
        for depth, segment in enumerate(path):
            if segment in seen:
                continue
            seen.add(segment)
            for first in range(segment.start, segment.end, BAND_ROWS):
                queries = np.arange(first, min(first + BAND_ROWS, segment.end))
                yield from _band(queries, segment.position + first - segment.start, path[: depth + 1], window)


def _band(queries: np.ndarray, position: int, path: Sequence[Segment], window: int) -> Iterator[TreePart]:
    """Yield the parts of a block of queries at `position`.

    Its keys lie in its own segment, the last of `path`, and in the segments before.
    """
    for keys in reversed(path):
        oldest = max(keys.position, position - window + 1)
        end = min(keys.position + keys.length, position + len(queries))
        # The kernel returns garbage for queries that see nothing.
        seeing = queries[: max(0, end + window - 1 - position)]
        if oldest < end and len(seeing):
            rows = keys.start - keys.position + np.arange(oldest, end)
            band = Band(first_query=position, first_key=oldest, window=window)
            yield TreePart(seeing[None], rows[None], np.zeros((1, len(seeing)), bool), band=band)


def _stacked(blocks: Iterable[Block]) -> Iterator[TreePart]:
    """Stack blocks with equally many keys and similarly many queries.

    Numbers of queries in a stack differ by at most an eighth.
    """
    alike: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block in blocks:
        alike[block.num_keys, _bucket(len(block.queries))].append(block)
    for (_, bucket), members in sorted(alike.items(), key=lambda item: item[0]):
        count = max(1, STACK_ROWS // bucket)
        yield from (_stack(members[i : i + count]) for i in range(0, len(members), count))


def _stack(blocks: Sequence[Block]) -> TreePart:
    queries_nQ = np.empty((len(blocks), max(len(block.queries) for block in blocks)), np.int64)
    is_repeated_nQ = np.ones(queries_nQ.shape, bool)
    for i, block in enumerate(blocks):
        length = len(block.queries)
        queries_nQ[i, :length] = block.queries
        queries_nQ[i, length:] = block.queries[-1]
        is_repeated_nQ[i, block.num_repeated : length] = False
    keys = [block.keys for block in blocks if block.keys is not None]
    return TreePart(queries_nQ, np.stack(keys) if keys else queries_nQ, is_repeated_nQ, is_causal=not keys)


def _bucket(length: int) -> int:
    step = 1 << max(0, (length - 1).bit_length() - 4)
    return -(-length // step) * step


class Tree(NamedTuple):
    """TreePlan of which keys each query sees, and the scale of the scores."""

    plan: TreePlan
    scale: float


class TreeAttention(torch.autograd.Function):
    """Autograd function: (q_NHD, k_NKD, v_NKD, sinks_H or None, tree) → out_NHD.

    Sinks are logits that take part in the softmax without a value.
    """

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
        # An infinite lse removes the repeated rows, which would count twice otherwise.
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
    """Return lse_NH, merged over all parts; -inf for rows that no part has."""
    none_NH = lse_MH.new_full((num_rows, lse_MH.shape[1]), -math.inf)
    top_NH = none_NH.scatter_reduce(0, rows_M.unsqueeze(1).expand_as(lse_MH), lse_MH, "amax")
    sum_NH = torch.zeros_like(top_NH).index_add_(0, rows_M, (lse_MH - top_NH.index_select(0, rows_M)).exp_())
    return top_NH + sum_NH.log_()


def _rows(x_nHQD: torch.Tensor) -> torch.Tensor:
    """Return x as (n · Q, H, D), or without D."""
    return x_nHQD.transpose(1, 2).flatten(0, 1)
