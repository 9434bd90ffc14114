"""One fault that was done, and what became of it: who noticed when, and when work went on."""

import math

import msgspec

from tests.chaos.events import since
from tests.chaos.run import Run
from tests.chaos.schedule import ENDS_IN_ORDER, Fault


class Struck(msgspec.Struct, kw_only=True):
    """One fault that was done."""

    fault: Fault
    struck_at: float
    back_at: float = 0.0
    """When what was struck could work again."""
    start_s: float | None = None
    """From the start of a process to that moment."""
    notice_s: float | None = None
    recover_s: float | None = None


def first_up(run: Run, process: str, server: int | None, since_s: float) -> float | None:
    """Return when this process was first up after a time."""
    told = (
        event.time_s
        for event in since(run.read_events(), since_s)
        if (event.process, event.name) == (process, "up") and server in (None, event.server)
    )
    return next(told, None)


def work_goes_on(run: Run, struck: Struck) -> bool:
    """Whether a group has come and a step was trained since; then it is noted after how long."""
    received = run.first("received", struck.back_at)
    consumed = run.first("consumed", received.time_s) if received else None
    if consumed is not None:
        # A server, or its engine, that ended with what was struck in it was started again later than that.
        ups = [
            event.time_s
            for event in since(run.read_events(), struck.struck_at)
            if event.name in ("up", "engine up") and event.process == "server"
            and struck.fault.server in (None, event.server) and event.time_s < consumed.time_s
        ]  # fmt: skip
        struck.back_at = max([struck.back_at, *ups])
        struck.recover_s = consumed.time_s - struck.back_at
    return consumed is not None


def notice_s(run: Run, struck: Struck, until_s: float) -> float | None:
    """How long the other side took to tell that its peer is lost; None where it had no time to."""
    fault = struck.fault
    if fault.target not in ("server", "learner", "link") or fault.kind in ENDS_IN_ORDER:
        return None
    about = None if fault.target == "learner" else fault.server
    lost = run.first("learner lost" if fault.target == "learner" else "server lost", struck.struck_at, about)
    # Who was not connected when it was struck could not be missed, and who is back is missed no more.
    found = run.first("server found", struck.struck_at, about)
    until_s = min(until_s, found.time_s if found else math.inf)
    if "kill" not in fault.kind:
        until_s = min(until_s, struck.back_at)
    return lost.time_s - struck.struck_at if lost and lost.time_s < until_s else None
