"""Prompts as a tree of exact ids, so that what several of them begin with is computed once. Under pack.py and training/packing.py.

    prompts ─▶ Run: tokens that they all have ─▶ those that end there, and those that go on in different ways: runs again

Invariant: the tokens on the way to where a prompt ends are that prompt's.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

MIN_SHARED = 32
"""Fewer tokens are computed again by whoever has them: another block of keys costs more."""


class Run(msgspec.Struct, frozen=True, eq=False):
    """Tokens from `start` to `end` of each prompt below it."""

    start: int
    end: int
    of: int
    """One of these prompts."""
    ends: list[int]
    """The prompts that end with it."""
    goes_on: list["Run"]


def runs_of(prompts: Sequence[np.ndarray]) -> list[Run]:
    """The roots. Prompts are named by their place."""
    return _runs(prompts, range(len(prompts)), 0, 0)


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens that both begin with."""
    if one is other:
        return len(one)
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _runs(prompts: Sequence[np.ndarray], members: Sequence[int], start: int, alike_until: int) -> list[Run]:
    """Of prompts that are alike up to there, from `start` on."""
    by_next: dict[int, list[int]] = {}
    for member in members:
        by_next.setdefault(int(prompts[member][alike_until]), []).append(member)
    return [run for alike in by_next.values() for run in _begun_alike(prompts, alike, start)]


def _begun_alike(prompts: Sequence[np.ndarray], members: list[int], start: int) -> list[Run]:
    first = members[0]
    end = min(common_length(prompts[first], prompts[member]) for member in members)
    ends = [member for member in members if len(prompts[member]) == end]
    longer = [member for member in members if len(prompts[member]) > end]
    if end - start >= MIN_SHARED or not longer:
        return [Run(start, end, first, ends, _runs(prompts, longer, end, end))]
    alone = [Run(start, end, ends[0], ends, [])] if ends else []
    return alone + _runs(prompts, longer, start, end)
