"""Measure the bottleneck of a run: the seconds spent waiting for a batch, by cause.

    the next batch misses a group that …     counted as
    is pending at the server                 server or link: the server's part of the round trip is what the
                                             server reports (Group.server_s), the rest is the link's
    is not scored yet                        reward
    has no reference logprobs yet            reference (reference_scores.py)
    is not admitted yet                      weight_sync, because the staleness rule allows it with the next version
    (no server generates)                    link
    nothing, and the server has no group     learner

rollout_buffer.py records the waits. They appear in the step metrics, the console line and the summary.
Invariant: no second is counted twice. Not thread-safe: rollout_buffer.py holds its lock.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

Part = Literal["server", "reward", "link", "weight_sync"]
DESCRIPTIONS = {
    "server": "the server's completions",
    "reward": "the reward functions",
    "reference": "the reference's server",
    "link": "the link to the server",
    "weight_sync": "new weights to reach the server",
    "learner": "the learner's steps, the server idle",
}
HELD_UP_SHARE = 0.5


class WaitTimes:
    """Waiting times of one batch."""

    def __init__(self) -> None:
        self._seconds: dict[Part, float] = {"server": 0.0, "reward": 0.0, "link": 0.0, "weight_sync": 0.0}
        self._at_server_s = self._on_link_s = 0.0

    def add(self, part: Part, seconds: float) -> None:
        """Add waiting time; `metrics` splits the server's part between server and link."""
        self._seconds[part] += seconds

    def record_arrival(self, round_trip_s: float, server_s: float) -> None:
        """Record a group's round trip and the server's share of it, in seconds."""
        self._at_server_s += min(server_s, round_trip_s)
        self._on_link_s += max(0.0, round_trip_s - server_s)

    @property
    def for_groups_s(self) -> float:
        """Seconds waited for groups that an earlier request might have provided."""
        return self._seconds["server"] + self._seconds["weight_sync"]

    def metrics(self) -> dict[str, float]:
        """Return the seconds of each part as bottleneck/<part>."""
        under_way_s = self._at_server_s + self._on_link_s
        link_s = self._seconds["server"] * (self._on_link_s / under_way_s if under_way_s else 0.0)
        seconds = self._seconds | {"server": self._seconds["server"] - link_s, "link": self._seconds["link"] + link_s}
        return {f"bottleneck/{part}": part_s for part, part_s in seconds.items()}


def learner_s(metrics: Mapping[str, float], server_idle_frac: float) -> float:
    """Return how many seconds of a step the server waited for the learner.

    These are the server's idle seconds outside the wait for the batch.
    """
    return server_idle_frac * (metrics["time/step"] - metrics["time/wait_for_batch"])


def shares(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each part's share of the time of these steps, largest first."""
    total_s = sum(metrics.get("time/step", 0.0) for metrics in steps)
    seconds = {part: sum(metrics.get(f"bottleneck/{part}", 0.0) for metrics in steps) for part in DESCRIPTIONS}
    ordered = sorted(seconds, key=lambda part: seconds[part], reverse=True)
    return {part: seconds[part] / total_s for part in ordered} if total_s > 0 else {}


def held_up_by(metrics: Mapping[str, float]) -> str | None:
    """Return the part that held up a step for more than half of its time, or None."""
    part, share = next(iter(shares([metrics]).items()), (None, 0.0))
    return part if share > HELD_UP_SHARE else None
