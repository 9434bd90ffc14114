"""Who sees whom in a pack, as blocks of queries and keys that ordinary attention kernels take without a mask.

    segments ─▶ each with itself: causal squares     each as keys of all that continues it: full rectangles     ─▶ Parts

Blocks of nearly one shape are stacked, since a call costs more than a few idle rows. Only where a sliding window is shorter than
a sequence a part has a mask: of a block of queries and the few keys they still see. Every visible (query, key) pair is in
exactly one part, and a row's first part comes before its others.

Suffixes: n stacked blocks, Q queries and K keys of a block.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import msgspec
import numpy as np
import torch

from learner.forward.pack import Pack, Segment

STACK_ROWS = 512
"""Queries of a stack, so that what is gathered stays in the cache."""
BAND_ROWS = 256
"""Queries of a masked block: its mask has at most BAND_ROWS × (window + BAND_ROWS) entries."""


class Band(NamedTuple):
    """Where a sliding window cuts a block: consecutive positions of its queries and its keys."""

    first_query: int
    first_key: int
    window: int


class Part(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A stack of blocks of one shape. A block that is shorter than the others repeats its last row, which counts once."""

    queries_nQ: torch.Tensor
    keys_nK: torch.Tensor
    is_real_nQ: torch.Tensor | None = None
    """Which queries are no repetition; None: all."""
    rows: torch.Tensor
    """The real queries, one after the other."""
    is_causal: bool = False
    band: Band | None = None
    is_first: bool = False
    """No part before it has these queries."""

    def bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """(1, 1, Q, K), -inf on what the window hides; None: nothing is hidden."""
        if self.band is None:
            return None
        queries_Q1 = self.band.first_query + torch.arange(self.queries_nQ.shape[1]).unsqueeze(1)
        keys_K = self.band.first_key + torch.arange(self.keys_nK.shape[1])
        is_hidden_QK = (keys_K > queries_Q1) | (keys_K <= queries_Q1 - self.band.window)
        return torch.zeros(is_hidden_QK.shape, dtype=dtype).masked_fill_(is_hidden_QK, -math.inf)[None, None]


def parts_of(pack: Pack, window: int | None) -> list[Part]:
    """Worked out once for a pack and a window."""
    if window not in pack.plans:
        longest = max(sum(segment.length for segment in path) for path in pack.paths_B)
        if window is None or longest <= window:
            pack.plans[window] = [*_squares(pack.segments), *_rectangles(pack.segments)]
        else:
            pack.plans[window] = list(_bands(pack, window))
    return cast(list[Part], pack.plans[window])


def _squares(segments: Sequence[Segment]) -> Iterator[Part]:
    runs = [(segment.start, segment.length) for segment in segments]
    for queries_nQ, is_real_nQ in _stacks(runs):
        yield _part(queries_nQ, queries_nQ, is_real_nQ, is_causal=True, is_first=True)


def _rectangles(segments: Sequence[Segment]) -> Iterator[Part]:
    by_width: dict[int, dict[int, Segment]] = defaultdict(dict)
    for segment in segments:
        if segment.length and segment.continued_until > segment.end:
            by_width[segment.length][segment.end] = segment
    for width, keys_by_query in by_width.items():
        runs = [(start, keys.continued_until - keys.end) for start, keys in keys_by_query.items()]
        for queries_nQ, is_real_nQ in _stacks(runs):
            first_keys = np.array([keys_by_query[start].start for start in queries_nQ[:, 0].tolist()])
            yield _part(queries_nQ, first_keys[:, None] + np.arange(width), is_real_nQ)


def _bands(pack: Pack, window: int) -> Iterator[Part]:
    seen: set[Segment] = set()
    for path in pack.paths_B:
        for depth, segment in enumerate(path):
            if segment in seen:
                continue
            seen.add(segment)
            for first in range(segment.start, segment.end, BAND_ROWS):
                queries = np.arange(first, min(first + BAND_ROWS, segment.end))
                yield from _band(queries, segment.position + first - segment.start, path[: depth + 1], window)


def _band(queries: np.ndarray, position: int, path: Sequence[Segment], window: int) -> Iterator[Part]:
    """What a block of queries at `position` sees of its own segment, the last of `path`, and of those before."""
    for keys in reversed(path):
        oldest = max(keys.position, position - window + 1)
        end = min(keys.position + keys.length, position + len(queries))
        seeing = queries[
            : max(0, end + window - 1 - position)
        ]  # of a query that sees nothing the kernel makes nonsense
        if oldest < end and len(seeing):
            rows = keys.start - keys.position + np.arange(oldest, end)
            band = Band(first_query=position, first_key=oldest, window=window)
            yield _part(seeing[None], rows[None], None, band=band, is_first=keys is path[-1])


def _stacks(runs: Sequence[tuple[int, int]]) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Runs (start, length) of rows with others that are longer by an eighth at most: rows [n, Q], and which are real."""
    by_bucket: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for start, length in runs:
        if length:  # of no rows the flash kernel makes a division by zero
            by_bucket[_bucket(length)].append((start, length))
    for bucket, members in by_bucket.items():
        count = max(1, STACK_ROWS // bucket)
        for i in range(0, len(members), count):
            starts_n1, lengths_n1 = np.array(members[i : i + count]).T[:, :, None]
            offsets_Q = np.arange(lengths_n1.max())
            is_real_nQ = offsets_Q < lengths_n1
            yield starts_n1 + np.minimum(offsets_Q, lengths_n1 - 1), None if is_real_nQ.all() else is_real_nQ


def _bucket(length: int) -> int:
    step = 1 << max(0, (length - 1).bit_length() - 4)
    return -(-length // step) * step


def _part(
    queries_nQ: np.ndarray, keys_nK: np.ndarray, is_real_nQ: np.ndarray | None, *,
    is_causal: bool = False, is_first: bool = False, band: Band | None = None,
) -> Part:  # fmt: skip
    real = queries_nQ.flatten() if is_real_nQ is None else queries_nQ[is_real_nQ]
    return Part(
        queries_nQ=torch.from_numpy(queries_nQ),
        keys_nK=torch.from_numpy(keys_nK),
        is_real_nQ=None if is_real_nQ is None else torch.from_numpy(is_real_nQ),
        rows=torch.from_numpy(real),
        is_causal=is_causal,
        band=band,
        is_first=is_first,
    )
