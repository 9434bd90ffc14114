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
Invariant: no second is counted twice. Not thread-safe: rollout_buffer.py holds its lock. ServerIdleness belongs
to the main thread.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

Cause = Literal["server", "reward", "link", "weight_sync"]
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
        self._seconds: dict[Cause, float] = {"server": 0.0, "reward": 0.0, "link": 0.0, "weight_sync": 0.0}
        self._at_server_s = self._on_link_s = 0.0

    def add(self, cause: Cause, seconds: float) -> None:
        """Add waiting time; `metrics` splits the server's time between server and link."""
        self._seconds[cause] += seconds

    def record_arrival(self, round_trip_s: float, server_s: float) -> None:
        """Record a group's round trip and the server's share of it, in seconds."""
        self._at_server_s += min(server_s, round_trip_s)
        self._on_link_s += max(0.0, round_trip_s - server_s)

    @property
    def for_groups_s(self) -> float:
        """Seconds waited for groups that an earlier request might have provided."""
        return self._seconds["server"] + self._seconds["weight_sync"]

    def metrics(self) -> dict[str, float]:
        """Return the seconds of each cause as bottleneck/<cause>."""
        under_way_s = self._at_server_s + self._on_link_s
        link_s = self._seconds["server"] * (self._on_link_s / under_way_s if under_way_s else 0.0)
        seconds = self._seconds | {"server": self._seconds["server"] - link_s, "link": self._seconds["link"] + link_s}
        return {f"bottleneck/{cause}": cause_s for cause, cause_s in seconds.items()}


class ServerIdleness:
    """Idle share of the servers in a step, measured apart for the wait for the batch and for the rest."""

    def __init__(self, read: Callable[[], tuple[float, float]]) -> None:
        """`read` returns the servers' seconds without a group, and the seconds observed, so far."""
        self._read = read
        self._share: float | None = None
        self.restart()

    def restart(self) -> None:
        """Forget the time so far."""
        self._before = self._read()
        self._in_wait = self._in_rest = (0.0, 0.0)

    def begin_wait(self) -> None:
        """Record that the wait for the batch begins."""
        self._in_rest = self._since_last(self._in_rest)

    def end_wait(self) -> None:
        """Record that the wait for the batch has ended."""
        self._in_wait = self._since_last(self._in_wait)

    def pop_metrics(self, step_s: float, wait_s: float) -> dict[str, float]:
        """Return the idle share of the step that ends, and how long the servers waited for the learner.

        The latter are their idle seconds outside the wait for the batch. A part without a heartbeat has the
        share of the whole step, and a step without one that of the step before.
        """
        wait, rest = self._in_wait, self._since_last(self._in_rest)
        self._in_wait = self._in_rest = (0.0, 0.0)
        if (observed_s := wait[1] + rest[1]) > 0:
            self._share = min(1.0, (wait[0] + rest[0]) / observed_s)
        if self._share is None:
            return {}
        learner_s = _share(rest, self._share) * (step_s - wait_s)
        self._share = (_share(wait, self._share) * wait_s + learner_s) / step_s
        return {"perf/server_idle_frac": self._share, "bottleneck/learner": learner_s}

    def _since_last(self, sums: tuple[float, float]) -> tuple[float, float]:
        (idle_s, observed_s), before = self._read(), self._before
        self._before = (idle_s, observed_s)
        return sums[0] + idle_s - before[0], sums[1] + observed_s - before[1]


def _share(part: tuple[float, float], default: float) -> float:
    return min(1.0, part[0] / part[1]) if part[1] > 0 else default


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
