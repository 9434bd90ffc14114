"""How long training stopped although a server was available: the spans between steps, less the unavoidable outages.

    steps ─▶ spans between them ─▶ less the outages of the learner and of all servers at once (outages.py) ─▶ Stop

Pure. Invariant: a period is subtracted only where the learner, or every server, was out.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from tests.chaos.outages import Outage

Interval = tuple[float, float]


class Stop(msgspec.Struct, frozen=True, order=True):
    """A span without a step."""

    seconds: float
    """Duration, less the outages in it."""
    from_s: float
    """Time of the step before the span."""
    until_s: float


def stops(steps_s: Sequence[float], out: Iterable[Outage], num_servers: int) -> list[Stop]:
    """Return the spans between steps, the longest first. `steps_s`: times of the steps."""
    excused = merged([*_of_the_learner(out := list(out)), *_of_all_servers(out, num_servers)])
    found = [
        Stop(until_s - from_s - sum(_common((from_s, until_s), each) for each in excused), from_s, until_s)
        for from_s, until_s in pairwise(sorted(steps_s))
    ]
    return sorted(found, reverse=True)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals, in order and without overlaps."""
    result: list[Interval] = []
    for from_s, until_s in sorted(intervals):
        if result and from_s <= result[-1][1]:
            result[-1] = (result[-1][0], max(until_s, result[-1][1]))
        else:
            result.append((from_s, until_s))
    return result


def _of_the_learner(out: Iterable[Outage]) -> list[Interval]:
    return [(each.from_s, each.until_s) for each in out if each.server is None]


def _of_all_servers(out: Sequence[Outage], num_servers: int) -> list[Interval]:
    """Return the periods in which every server was out."""
    common: list[Interval] = [(float("-inf"), float("inf"))]
    for server in range(num_servers):
        own = merged((each.from_s, each.until_s) for each in out if each.server == server)
        common = [
            (max(one[0], other[0]), min(one[1], other[1])) for one in common for other in own if _common(one, other) > 0
        ]
    return common


def _common(one: Interval, other: Interval) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
