"""The outages of the learner and the servers: when a fault kept them from working. stops.py subtracts them.

    supervisor.py records each harm ─▶ events show when a process, or an engine, was up again ─▶ outages

Invariant: an outage ends when its process is up again, not when its peers notice: their delay counts as a stop.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from tests.chaos.events import since
from tests.chaos.traps import Event

Remedy = Literal["up", "engine up", "let go"]


class Harm(msgspec.Struct, kw_only=True):
    """A fault that stops a process until the process or its engine restarts, or until the fault is undone."""

    server: int | None
    """Number of the server. None: the learner."""
    from_s: float
    until: Remedy
    let_go_s: float = math.inf


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """A period without a server, or without the learner."""

    server: int | None
    from_s: float
    until_s: float


def outages(harms: Sequence[Harm], events: Sequence[Event]) -> list[Outage]:
    """Return the period of each harm; a harm without an end lasts forever."""
    return [Outage(server=harm.server, from_s=harm.from_s, until_s=_end_of(harm, events)) for harm in harms]


def _end_of(harm: Harm, events: Sequence[Event]) -> float:
    if harm.until == "let go":
        return harm.let_go_s
    process = "learner" if harm.server is None else "server"
    ups = (
        event.time_s
        for event in since(events, harm.from_s)
        if (event.process, event.name, event.server) == (process, harm.until, harm.server)
    )
    return next(ups, math.inf)
