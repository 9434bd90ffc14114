"""How long training stood still although a server was left: the spans between two steps, less what nobody could help.

    steps ─▶ spans between them ─▶ without the times in which the learner, or every server, was out (outages.py) ─▶ Stop

Pure. Invariant: a time is taken out only where no learner was there, or no server at all.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from tests.chaos.outages import Outage

Interval = tuple[float, float]


class Stop(msgspec.Struct, frozen=True, order=True):
    """A span without a step."""

    seconds: float
    """Without what was taken out."""
    from_s: float
    """Of the step before it."""
    until_s: float


def stops(steps_s: Sequence[float], out: Iterable[Outage], num_servers: int) -> list[Stop]:
    """Return the spans between steps, the longest first. `steps_s`: when they were done."""
    excused = merged([*_of_the_learner(out := list(out)), *_of_all_servers(out, num_servers)])
    found = [
        Stop(until_s - from_s - sum(_common((from_s, until_s), each) for each in excused), from_s, until_s)
        for from_s, until_s in pairwise(sorted(steps_s))
    ]
    return sorted(found, reverse=True)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same times, without overlap and in order."""
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
    """The times that lie in an outage of every server."""
    common: list[Interval] = [(float("-inf"), float("inf"))]
    for server in range(num_servers):
        own = merged((each.from_s, each.until_s) for each in out if each.server == server)
        common = [
            (max(one[0], other[0]), min(one[1], other[1])) for one in common for other in own if _common(one, other) > 0
        ]
    return common


def _common(one: Interval, other: Interval) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
