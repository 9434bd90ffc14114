"""Assignment of a step's rows to ranks and micro-batches, with each prompt computed as rarely as possible.

    rows ─▶ pieces: a group's rows, split above the token budget ─▶ ranks, balanced by cost ─▶ micro-batches

Invariant: every row is in exactly one micro-batch of one rank. Every rank that calls share_out with the same
rows gets the same result.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from itertools import groupby

import msgspec

from learner.forward.pack import MIN_SHARED, common_length
from learner.training.batch import BatchRow

Piece = list[BatchRow]
"""Rows of one group that share one computation of their common prompt prefix."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Arrangement of rows in a forward pass, and the cost of a pass."""

    max_tokens: int
    """Maximum number of tokens of a micro-batch, gathered keys included; a longer row forms its own."""
    is_packed: bool
    """Whether rows are packed. Otherwise each row is padded to the longest of its micro-batch and carries its
    own prompt."""
    pair_cost: float
    """Cost of one (query, key) pair of the attention, in units of one token through the rest of the model."""
    key_size: float = 0.0
    """Memory of one gathered key with its value, in units of the memory of one token."""

    def cost(self, piece: Piece) -> float:
        """Return the cost of the piece's forward pass, in tokens."""
        return num_tokens(piece) + self.pair_cost * num_pairs(piece)

    def size(self, before: BatchRow | None, row: BatchRow) -> float:
        """Return the memory that a row adds to a packed pass, in tokens; `before` is the row before it in its piece.

        Its completion gathers the keys of its prompt again, and the part of the prompt that is new gathers its own.
        """
        new = _num_new(before, row)
        return new + len(row.branch.token_ids) + self.key_size * (new + row.num_tokens)


def pieces_of(rows: Sequence[BatchRow], layout: Layout) -> list[Piece]:
    """Split rows into groups that fit a micro-batch; unpacked rows stay single."""
    if not layout.is_packed:
        return [[row] for row in rows]
    pieces: list[Piece] = []
    for _, rows_G in groupby(rows, key=lambda row: row.group):
        piece: Piece = []
        size = 0.0
        for row in rows_G:
            more = layout.size(piece[-1] if piece else None, row)
            if piece and size + more > layout.max_tokens:
                pieces.append(piece)
                piece, size, more = [], 0.0, layout.size(None, row)
            piece.append(row)
            size += more
        pieces.append(piece)
    return pieces


def num_tokens(piece: Piece) -> int:
    """Return the approximate number of tokens computed for a piece.

    The prefix that a prompt shares with the previous row's prompt counts once.
    """
    rows_before = [None, *piece[:-1]]
    return sum(
        _num_new(before, row) + len(row.branch.token_ids) for before, row in zip(rows_before, piece, strict=True)
    )


def num_pairs(piece: Piece) -> float:
    """Return the approximate number of causal (query, key) pairs of a piece."""
    pairs = 0.0
    for before, row in zip([None, *piece[:-1]], piece, strict=True):
        prompt, length = len(row.prompt_token_ids), len(row.branch.token_ids)
        new = _num_new(before, row)
        pairs += new * (prompt - new / 2) + length * (prompt + length / 2)
    return pairs


def _num_new(before: BatchRow | None, row: BatchRow) -> int:
    """Return how many prompt tokens a row does not share with the previous row."""
    length = len(row.prompt_token_ids)
    if before is None:
        return length
    shared = common_length(before.prompt_token_ids, row.prompt_token_ids)
    is_same = shared == length == len(before.prompt_token_ids)
    return length - shared if is_same or shared >= MIN_SHARED else length


def share_out(rows: Sequence[BatchRow], num_ranks: int, layout: Layout) -> list[list[Piece]]:
    """Return each rank's pieces, with the cost balanced over the ranks.

    The most expensive remaining piece goes to the rank with the lowest load (LPT, Graham 1969). A piece above
    a rank's even share is halved, at the cost of computing its prompt again.
    """
    pieces = pieces_of(rows, layout)
    if num_ranks == 1:
        return [pieces]
    fair = sum(map(layout.cost, pieces)) / num_ranks
    pieces = [part for piece in pieces for part in _halved(piece, fair, layout)]
    ranks: list[list[Piece]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for piece in sorted(pieces, key=layout.cost, reverse=True):
        load, rank = heapq.heappop(loads)
        ranks[rank].append(piece)
        heapq.heappush(loads, (load + layout.cost(piece), rank))
    return ranks


def _halved(piece: Piece, most: float, layout: Layout) -> list[Piece]:
    if len(piece) == 1 or layout.cost(piece) <= most:
        return [piece]
    middle = math.ceil(len(piece) / 2)
    return [*_halved(piece[:middle], most, layout), *_halved(piece[middle:], most, layout)]


def split_into_micro_batches(pieces: Sequence[Piece], layout: Layout) -> list[list[BatchRow]]:
    """Return the rows of each micro-batch.

    Pieces are placed longest first, each into the first micro-batch with room.
    """
    if not layout.is_packed:
        return _cut_padded([row for piece in pieces for row in piece], layout.max_tokens)
    batches: list[list[BatchRow]] = []
    room: list[float] = []
    for piece in sorted(pieces, key=num_tokens, reverse=True):
        needed = sum(itertools.starmap(layout.size, zip([None, *piece[:-1]], piece, strict=True)))
        fitting = next((i for i, free in enumerate(room) if free >= needed), None)
        if fitting is None:
            batches.append(list(piece))
            room.append(layout.max_tokens - needed)
        else:
            batches[fitting] += piece
            room[fitting] -= needed
    return batches


def _cut_padded(rows: list[BatchRow], max_tokens: int) -> list[list[BatchRow]]:
    rows = sorted(rows, key=lambda row: row.num_tokens, reverse=True)
    batches: list[list[BatchRow]] = []
    while rows:
        count = max(1, max_tokens // rows[0].num_tokens)
        batches.append(rows[:count])
        rows = rows[count:]
    return batches
