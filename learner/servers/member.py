"""One server of the fleet: the link to it and the weights that it has.

    joining ─ welcomed ─▶ syncing ─ its push is published ─▶ ready ─ its endpoint is taken away, or it says so ─▶ draining ─▶ gone
       ▲                     │ lost, or a push failed          │                                                             ▲
       └─────────────────────┴─────────────────────────────────┘                    any state, if it does not fit this run ──┘

Between the link and whoever asks for groups or pushes. Invariant: what it is follows from what is known of it; no state is kept
that could contradict it.
"""

import asyncio
from typing import Literal

from learner.servers.link import ServerLink
from protocol.messages import Welcome

State = Literal["joining", "syncing", "ready", "draining", "gone"]


class Member:
    """Changed by fleet.py alone, in its loop; read from any thread."""

    def __init__(self, endpoint: str, link: ServerLink) -> None:
        self.endpoint, self.link = endpoint, link
        self.task: asyncio.Task[None] | None = None
        """Keeps the link up."""
        self.served: tuple[str, int] | None = None
        """Server id and version of what was published last with this server among those that have it."""
        self.chosen_at = 0
        """When it was last chosen, in choices of the fleet."""
        self.is_unlisted = self.is_gone = False
        self.noted_state: State = "joining"
        """The last one that was told."""

    @property
    def is_draining(self) -> bool:
        """Its endpoint was taken out of the list, or the server was told to end and has said so."""
        return self.is_unlisted or self.link.is_draining

    @property
    def welcome(self) -> Welcome | None:
        """What the server that is connected now has said; None while there is none."""
        return self.link.welcome if self.link.connected else None

    def state(self, version: int | None) -> State:
        """`version`: the one that was published last."""
        welcome = self.welcome
        if self.is_gone:
            return "gone"
        if self.is_draining:
            return "draining"
        if welcome is None:
            return "joining"
        return "ready" if self.served is not None and self.served == (welcome.server_id, version) else "syncing"
