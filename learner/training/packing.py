"""Which rows go together: a step's rows to ranks and micro-batches, so that every prompt is computed as seldom as possible.

    rows ─▶ pieces: a group's rows, cut where they exceed the budget ─▶ ranks, evened out by arithmetic ─▶ micro-batches

Between rows (batch.py) and the forward pass. Invariant: every row is in exactly one micro-batch of one rank, and every rank that
calls share_out with the same rows gets the same answer.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import groupby

import msgspec

from learner.forward.pack import MIN_SHARED, common_length
from learner.training.batch import Row

Piece = list[Row]
"""Rows of one group that share one computation of what their prompts have in common."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How rows lie in a forward pass, and what a pass over them costs."""

    max_tokens: int
    """Of a micro-batch; a longer row goes alone."""
    is_packed: bool
    """Otherwise every row is padded to the longest of its micro-batch, and has its prompt for itself."""
    pair_cost: float
    """Arithmetic of a (query, key) pair of the attention, in that of a token through everything else."""

    def cost(self, piece: Piece) -> float:
        """Of a piece's forward pass, in tokens."""
        return num_tokens(piece) + self.pair_cost * num_pairs(piece)


def pieces_of(rows: Sequence[Row], layout: Layout) -> list[Piece]:
    """Whole groups as far as they fit into a micro-batch; without packing each row by itself."""
    if not layout.is_packed:
        return [[row] for row in rows]
    pieces: list[Piece] = []
    for _, rows_G in groupby(rows, key=lambda row: row.group):
        piece: Piece = []
        size = 0
        for row in rows_G:
            more = _num_new(piece[-1] if piece else None, row) + len(row.branch.token_ids)
            if piece and size + more > layout.max_tokens:
                pieces.append(piece)
                piece, size, more = [], 0, row.num_tokens
            piece.append(row)
            size += more
        pieces.append(piece)
    return pieces


def num_tokens(piece: Piece) -> int:
    """Nearly: what a prompt shares with that of the row before it is computed once."""
    rows_before = [None, *piece[:-1]]
    return sum(
        _num_new(before, row) + len(row.branch.token_ids) for before, row in zip(rows_before, piece, strict=True)
    )


def num_pairs(piece: Piece) -> float:
    """(query, key) pairs of its causal attention, likewise."""
    pairs = 0.0
    for before, row in zip([None, *piece[:-1]], piece, strict=True):
        prompt, length = len(row.prompt_token_ids), len(row.branch.token_ids)
        new = _num_new(before, row)
        pairs += new * (prompt - new / 2) + length * (prompt + length / 2)
    return pairs


def _num_new(before: Row | None, row: Row) -> int:
    """Tokens of a row's prompt that the one before does not begin with."""
    length = len(row.prompt_token_ids)
    if before is None:
        return length
    shared = common_length(before.prompt_token_ids, row.prompt_token_ids)
    is_same = shared == length == len(before.prompt_token_ids)
    return length - shared if is_same or shared >= MIN_SHARED else length


def share_out(rows: Sequence[Row], num_ranks: int, layout: Layout) -> list[list[Piece]]:
    """Each rank's pieces, of as even a cost as can be: the dearest first, each to the rank that has least (LPT, Graham 1969).

    A piece that is dearer than a rank's even share is halved, at the price of its prompt.
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


def cut(pieces: Sequence[Piece], layout: Layout) -> list[list[Row]]:
    """The rows of each micro-batch, the longest pieces first, each into the first that has room for it."""
    if not layout.is_packed:
        return _cut_padded([row for piece in pieces for row in piece], layout.max_tokens)
    batches: list[list[Row]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=num_tokens, reverse=True):
        needed = num_tokens(piece)
        place = next((i for i, free in enumerate(room) if free >= needed), None)
        if place is None:
            batches.append(list(piece))
            room.append(layout.max_tokens - needed)
        else:
            batches[place] += piece
            room[place] -= needed
    return batches


def _cut_padded(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    rows = sorted(rows, key=lambda row: row.num_tokens, reverse=True)
    batches: list[list[Row]] = []
    while rows:
        count = max(1, max_tokens // rows[0].num_tokens)
        batches.append(rows[:count])
        rows = rows[count:]
    return batches
