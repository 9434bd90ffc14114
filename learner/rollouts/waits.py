"""Which part of the run holds it up: the seconds for which a batch was waited for, by what it lacked. From queue.py to
the metrics of a step, the word at the end of its console line and the sentence in the summary.

    the next batch lacks a group that …      waited for
    the server owes                          server or link: a group's time from the request to its arrival is the server's
                                             as far as the server says so (Group.server_s), the rest the link's
    is not scored yet                        reward
    is not asked for yet                     push, for the rule allows it with the next version
    (there is no connection)                 link
    nothing, and the server has no group     learner

Invariant: no second is counted for two parts. Not thread-safe: queue.py holds its lock.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

Part = Literal["server", "reward", "link", "push"]
IN_WORDS = {
    "server": "the server's completions",
    "reward": "the reward functions",
    "link": "the link to the server",
    "push": "new weights to reach the server",
    "learner": "the learner's steps, the server idle",
}
HELD_UP_SHARE = 0.5


class Waits:
    """The waits for one batch."""

    def __init__(self) -> None:
        self._seconds: dict[Part, float] = {"server": 0.0, "reward": 0.0, "link": 0.0, "push": 0.0}
        self._at_server_s = self._on_link_s = 0.0

    def add(self, part: Part, seconds: float) -> None:
        """What is added to the server is divided between it and the link when the batch is complete."""
        self._seconds[part] += seconds

    def note_arrival(self, round_trip_s: float, server_s: float) -> None:
        """A group came so long after it was asked for; for so long of that it was the server's."""
        self._at_server_s += min(server_s, round_trip_s)
        self._on_link_s += max(0.0, round_trip_s - server_s)

    @property
    def for_groups_s(self) -> float:
        """For groups that might have been there had they been asked for earlier."""
        return self._seconds["server"] + self._seconds["push"]

    def metrics(self) -> dict[str, float]:
        """wait/<part> in seconds."""
        under_way_s = self._at_server_s + self._on_link_s
        link_s = self._seconds["server"] * (self._on_link_s / under_way_s if under_way_s else 0.0)
        seconds = self._seconds | {"server": self._seconds["server"] - link_s, "link": self._seconds["link"] + link_s}
        return {f"wait/{part}": part_s for part, part_s in seconds.items()}


def learner_s(metrics: Mapping[str, float], server_idle_frac: float) -> float:
    """For how much of a step the server waited for the learner: it was idle, and not for the batch that was waited for."""
    return server_idle_frac * (metrics["time/step"] - metrics["time/wait_for_batch"])


def shares(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the time of these steps, the share that each part held them up, the largest first."""
    total_s = sum(metrics.get("time/step", 0.0) for metrics in steps)
    seconds = {part: sum(metrics.get(f"wait/{part}", 0.0) for metrics in steps) for part in IN_WORDS}
    ordered = sorted(seconds, key=lambda part: seconds[part], reverse=True)
    return {part: seconds[part] / total_s for part in ordered} if total_s > 0 else {}


def held_up_by(metrics: Mapping[str, float]) -> str | None:
    """The part that held a step up for more than half of it, if there is one."""
    part, share = next(iter(shares([metrics]).items()), (None, 0.0))
    return part if share > HELD_UP_SHARE else None
