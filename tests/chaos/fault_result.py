"""The result of one fault: when the peer noticed it, and when work continued."""

import math

import msgspec

from tests.chaos.events import since
from tests.chaos.run import Run
from tests.chaos.schedule import ENDS_IN_ORDER, Fault


class FaultResult(msgspec.Struct, kw_only=True):
    """One fault and the times that followed it."""

    fault: Fault
    struck_at: float
    back_at: float = 0.0
    """When the target could work again."""
    start_s: float | None = None
    """From the restart of a process until it could work."""
    notice_s: float | None = None
    recover_s: float | None = None


def first_up(run: Run, process: str, server: int | None, since_s: float) -> float | None:
    """Return when this process was first up after `since_s`."""
    ups = (
        event.time_s
        for event in since(run.read_events(), since_s)
        if (event.process, event.name) == (process, "up") and server in (None, event.server)
    )
    return next(ups, None)


def has_recovered(run: Run, result: FaultResult) -> bool:
    """Return whether a group was received and a step trained since the fault; if so, set `recover_s`."""
    received = run.first("received", result.back_at)
    consumed = run.first("consumed", received.time_s) if received else None
    if consumed is not None:
        # A server, or its engine, that ended with its target restarted later than the target.
        ups = [
            event.time_s
            for event in since(run.read_events(), result.struck_at)
            if event.name in ("up", "engine up") and event.process == "server"
            and result.fault.server in (None, event.server) and event.time_s < consumed.time_s
        ]  # fmt: skip
        result.back_at = max([result.back_at, *ups])
        result.recover_s = consumed.time_s - result.back_at
    return consumed is not None


def notice_s(run: Run, result: FaultResult, until_s: float) -> float | None:
    """Return how long the peer took to notice the loss; None if the fault was too short."""
    fault = result.fault
    if fault.target not in ("server", "learner", "link") or fault.kind in ENDS_IN_ORDER:
        return None
    about = None if fault.target == "learner" else fault.server
    lost = run.first("learner lost" if fault.target == "learner" else "server lost", result.struck_at, about)
    # A target that was not connected cannot be missed, and a target that is back is no longer missed.
    found = run.first("server found", result.struck_at, about)
    until_s = min(until_s, found.time_s if found else math.inf)
    if "kill" not in fault.kind:
        until_s = min(until_s, result.back_at)
    return lost.time_s - result.struck_at if lost and lost.time_s < until_s else None
