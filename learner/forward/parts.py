"""Who sees whom in a pack, as blocks of queries and keys that ordinary attention kernels take without a mask.

    segments ─▶ each with itself: causal squares     each as keys of all that continues it: full rectangles     ─▶ Parts

Blocks of nearly one shape are stacked, since a call costs more than a few idle rows. Only where a sliding window is shorter than
a sequence a part has a mask: of a block of queries and the few keys they still see. Every visible (query, key) pair is in
exactly one part, and a row's first part comes before its others.

Suffixes: n stacked blocks, Q queries and K keys of a block, R rows of either; m real queries of a stack.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import msgspec
import numpy as np
import torch

from learner.forward.pack import Pack, Segment

STACK_ROWS = 512
"""Queries of a stack, so that what is gathered stays in the cache."""
WHOLE, HALVED, HALF_STEP = 128, 1024, 32
"""Squares of these sizes are halved; the kernel leaves out what they hide in steps of 512 keys only. Halves are multiples, to stack."""
SHORT = 32
"""A prompt of so few tokens stands in the square of each of its completions: a block of its own would cost more."""
BAND_ROWS = 256
"""Queries of a masked block: its mask has at most BAND_ROWS × (window + BAND_ROWS) entries."""


class Block(NamedTuple):
    """Rows and what they see: all of the keys, or, without any, each other as far as they stand before."""

    queries: np.ndarray
    keys: np.ndarray | None
    num_repeated: int = 0
    """Leading queries that are another block's."""

    @property
    def num_keys(self) -> int:
        return 0 if self.keys is None else len(self.keys)


class Band(NamedTuple):
    """Where a sliding window cuts a block: consecutive positions of its queries and its keys."""

    first_query: int
    first_key: int
    window: int


class Rows(msgspec.Struct, frozen=True, eq=False):
    """Which rows of a pack a stack of blocks has."""

    at_nR: torch.Tensor
    first: int | None
    """Of a single block of consecutive rows: they need not be gathered."""


class Part(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A stack of blocks of one shape. A block that is shorter than the others repeats its last row, which counts once."""

    queries: Rows
    keys: Rows
    is_real_nQ: torch.Tensor | None = None
    """Which queries are no repetition; None: all."""
    real_m: torch.Tensor | None = None
    """The same as places in the flattened stack."""
    rows_m: torch.Tensor
    """Where the real queries stand in the pack, one after the other."""
    is_causal: bool = False
    band: Band | None = None
    is_first: bool = False
    """No part before it has these queries."""

    def bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """(1, 1, Q, K), -inf on what the window hides; None: nothing is hidden."""
        if self.band is None:
            return None
        queries_Q1 = self.band.first_query + torch.arange(self.queries.at_nR.shape[1]).unsqueeze(1)
        keys_K = self.band.first_key + torch.arange(self.keys.at_nR.shape[1])
        is_hidden_QK = (keys_K > queries_Q1) | (keys_K <= queries_Q1 - self.band.window)
        return torch.zeros(is_hidden_QK.shape, dtype=dtype).masked_fill_(is_hidden_QK, -math.inf)[None, None]


def parts_of(pack: Pack, window: int | None, *, predicting_only: bool = False) -> list[Part]:
    """Worked out once for a pack and a window. `predicting_only`: other rows may be left out as queries."""
    key = (window, predicting_only)
    if key not in pack.plans:
        longest = max(sum(segment.length for segment in path) for path in pack.paths_B)
        if window is not None and longest > window:
            pack.plans[key] = list(_bands(pack, window))
        elif predicting_only:
            pack.plans[key] = _stacked(_predicting(pack))
        else:
            pack.plans[key] = _stacked(_blocks(pack.segments))
    return cast(list[Part], pack.plans[key])


def _predicting(pack: Pack) -> Iterator[Block]:
    """The blocks without what only queries that predict nothing see; of a prompt's square its last row may be left."""
    blocks = list(_blocks(pack.segments))
    is_read_N = np.zeros(pack.num_tokens, bool)
    is_read_N[pack.read_R.numpy()] = True
    for block in blocks:  # the backward pass needs the lse of repeated rows too
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
    """Every row with itself and all that stands before it."""
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
    """Each root, and what continues it."""
    roots = [i for i, segment in enumerate(segments) if not segment.position]
    for i, end in itertools.pairwise([*roots, len(segments)]):
        yield segments[i], segments[i + 1 : end]


def _square(rows: np.ndarray, num_repeated: int = 0) -> Iterator[Block]:
    """Rows with themselves: halved while the kernel would compute all that it hides."""
    if WHOLE < len(rows) <= HALVED:
        middle = -(-len(rows) // (2 * HALF_STEP)) * HALF_STEP
        yield from _square(rows[:middle], num_repeated)
        yield from _square(rows[middle:])
        yield Block(rows[middle:], rows[:middle])
    elif len(rows) > num_repeated:
        yield Block(rows, None, num_repeated)


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


def _stacked(blocks: Iterable[Block]) -> list[Part]:
    """Blocks with others whose queries are more by an eighth at most, squares first."""
    alike: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block in blocks:
        alike[block.num_keys, _bucket(len(block.queries))].append(block)
    parts = []
    for (_, bucket), members in sorted(alike.items(), key=lambda item: item[0]):
        count = max(1, STACK_ROWS // bucket)
        parts += [_stack(members[i : i + count]) for i in range(0, len(members), count)]
    return parts


def _stack(blocks: Sequence[Block]) -> Part:
    queries_nQ = np.empty((len(blocks), max(len(block.queries) for block in blocks)), np.int64)
    is_real_nQ = np.zeros(queries_nQ.shape, bool)
    for i, block in enumerate(blocks):
        length = len(block.queries)
        queries_nQ[i, :length] = block.queries
        queries_nQ[i, length:] = block.queries[-1]
        is_real_nQ[i, block.num_repeated : length] = True
    keys = [block.keys for block in blocks if block.keys is not None]
    is_causal = not keys
    return _part(
        queries_nQ, np.stack(keys) if keys else queries_nQ, None if is_real_nQ.all() else is_real_nQ,
        is_causal=is_causal, is_first=is_causal,
    )  # fmt: skip


def _bucket(length: int) -> int:
    step = 1 << max(0, (length - 1).bit_length() - 4)
    return -(-length // step) * step


def _part(
    queries_nQ: np.ndarray, keys_nK: np.ndarray, is_real_nQ: np.ndarray | None, *,
    is_causal: bool = False, is_first: bool = False, band: Band | None = None,
) -> Part:  # fmt: skip
    real_m = None if is_real_nQ is None else np.flatnonzero(is_real_nQ)
    return Part(
        queries=_rows(queries_nQ),
        keys=_rows(keys_nK),
        is_real_nQ=None if is_real_nQ is None else torch.from_numpy(is_real_nQ),
        real_m=None if real_m is None else torch.from_numpy(real_m),
        rows_m=torch.from_numpy(queries_nQ.flatten() if real_m is None else queries_nQ.flatten()[real_m]),
        is_causal=is_causal,
        band=band,
        is_first=is_first,
    )


def _rows(at_nR: np.ndarray) -> Rows:
    num, length = at_nR.shape
    first = int(at_nR[0, 0])
    is_run = num == 1 and at_nR[0, -1] == first + length - 1
    return Rows(torch.from_numpy(at_nR), first if is_run else None)
