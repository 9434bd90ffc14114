"""When the learner, or a server, could not work because of what was done to it: what stops.py takes out.

    supervisor.py notes every harm as it does it ─▶ told events say when a process, or an engine, was up again ─▶ outages

Invariant: an outage ends when whoever was struck is there again, not when the others have noticed: that is theirs to be quick about.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from tests.chaos.events import since
from tests.chaos.traps import Event

Remedy = Literal["up", "engine up", "let go"]


class Harm(msgspec.Struct, kw_only=True):
    """Something that keeps a process from working until it, or its engine, has been started again, or it is let go."""

    server: int | None
    """None: the learner."""
    from_s: float
    until: Remedy
    let_go_s: float = math.inf


class Outage(msgspec.Struct, frozen=True, kw_only=True):
    """A time in which a server, or the learner, was not there."""

    server: int | None
    from_s: float
    until_s: float


def outages(harms: Sequence[Harm], events: Sequence[Event]) -> list[Outage]:
    """Return when each harm began and ended; one that has not ended lasts for ever."""
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
