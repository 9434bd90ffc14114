"""Tenancy of the server: one run holds it, through one process of its learner.

               Hello of any run                        connection lost
      free ────────────────────────▶ held by (run, learner) ────────────────▶ away
       ▲                                  │        ▲                          │  │
       │ Farewell: the run is over        │        │ Hello of the same run    │  │
       ├──────────────────────────────────┘        └──────────────────────────┘  │
       └──────── server.orphan_timeout_s after the connection loss ──────────────┘

`Tenancy` reads no clock and sends nothing: each call receives the time, and server.py acts on the results.
Invariant: the holder keeps the server while connected, and for the timeout after that. Meanwhile, other runs
get a busy answer, and so do other processes of the same run while the holder is connected.
"""

import math
from typing import Any, Literal

import msgspec

State = Literal["free", "held", "away"]


class LeaseHolder(msgspec.Struct, frozen=True):
    """Learner process that holds the server."""

    run: str
    learner: str
    peer: bytes
    """Newest connection of the process."""

    @property
    def process(self) -> str:
        """Host and process id, for logs and messages.

        The rest of the name stays secret, because a process that knows it can take over the server.
        """
        return self.learner.rpartition(":")[0] or self.learner


class BusyReason(msgspec.Struct, frozen=True):
    """Reason why a learner has to wait."""

    reason: str
    free_in_s: float | None
    """Seconds until the server is free. None: the holder is connected, so the time is unknown."""


class Tenancy:
    """Tenancy state of one server."""

    def __init__(self, orphan_timeout_s: float, now: float) -> None:
        self._orphan_timeout_s = orphan_timeout_s
        self.holder: LeaseHolder | None = None
        self._is_away = False
        self._since = self._last_seen = now
        """Time at which the current state started, and time of the last sign of the run while it is away."""

    @property
    def state(self) -> State:
        if self.holder is None:
            return "free"
        return "away" if self._is_away else "held"

    def why_busy(self, run: str, learner: str, now: float) -> BusyReason | None:
        """Return why this learner cannot have the server now, or None."""
        holder, state, since_s = self.holder, self.state, now - self._since
        if holder is None or self.is_due(now):
            return None
        if holder.run == run and (state == "away" or holder.learner == learner):
            return None
        if state == "away":
            reason = (
                f"the server is kept for run {holder.run} for {self._orphan_timeout_s:g} s (server.orphan_timeout_s); "
                f"its learner {holder.process} was last seen {now - self._last_seen:.0f} s ago. Wait, or start another "
                "server"
            )
        elif holder.run == run and holder.process == learner.rpartition(":")[0]:
            reason = (
                f"the same process, {holder.process}, has the server already as another of the servers of run {run}. "
                "Give the policy and learner.reference.endpoint a server each"
            )
        elif holder.run == run:
            reason = (
                f"another process of run {run} has held the server for {since_s:.0f} s: {holder.process} "
                "(host:process id). Stop one of the two"
            )
        else:
            reason = (
                f"the server is busy with run {holder.run}, whose learner {holder.process} has held it for "
                f"{since_s:.0f} s. Wait until that run is over, stop it, or start another server"
            )
        return BusyReason(reason, self.free_in_s(now))

    def hold(self, holder: LeaseHolder, now: float) -> bool:
        """Give the server to a learner that does not have to wait.

        Return True if the server was free, so that nothing on it belongs to this run.
        """
        assert self.why_busy(holder.run, holder.learner, now) is None
        if self.is_due(now):
            self.free(now)
        before, self.holder = self.holder, holder
        if self._is_away or before is None or before.learner != holder.learner:
            self._is_away, self._since = False, now
        return before is None

    def lose(self, now: float) -> None:
        """Record the loss of the holder's connection."""
        if self.state == "held":
            self._is_away, self._since, self._last_seen = True, now, now

    def extend(self, run: str, now: float) -> None:
        """Restart the timeout if the server is kept for this run.

        Called for a Hello that the server cannot accept yet.
        """
        if self.state == "away" and self.holder is not None and self.holder.run == run:
            self._last_seen = now

    def is_due(self, now: float) -> bool:
        """Return True if the holder has been away for the full timeout."""
        return self.state == "away" and now - self._last_seen >= self._orphan_timeout_s

    def free(self, now: float) -> None:
        """Release the server, because the run is over or its learner stays away."""
        if self.holder is not None:
            self.holder, self._is_away, self._since = None, False, now

    def free_in_s(self, now: float) -> float | None:
        """Return the seconds until the server is free, or None while the state is "held"."""
        match self.state:
            case "free":
                return 0.0
            case "held":
                return None
            case "away":
                return max(0.0, self._last_seen + self._orphan_timeout_s - now)

    def away_s(self, now: float) -> float:
        """Return the seconds since the holder was connected: 0 if held, inf if free.

        `extend` does not change it: a drain does not wait for a learner that it gives no answer.
        """
        match self.state:
            case "free":
                return math.inf
            case "held":
                return 0.0
            case "away":
                return now - self._since

    def status(self, now: float) -> dict[str, Any]:
        """Return the part of /status about the tenancy."""
        free_in_s = self.free_in_s(now)
        return {
            "state": self.state,
            "run": self.holder.run if self.holder else None,
            "learner": self.holder.process if self.holder else None,
            "since_s": round(now - self._since, 3),
            "free_in_s": None if free_in_s is None else round(free_in_s, 3),
        }
