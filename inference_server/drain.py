"""Drain of a server: it accepts no new work, finishes the work it has, and exits.

    signal ─▶ Pulse(is_draining) ─▶ return waiting groups ─▶ finish groups, scores, sync, /v1 ─▶ Acks
                 └── Farewell of the learner ────────────────────┘  server.drain_timeout_s: exit regardless

The drain waits for running work and for the learner's Farewell, before which more requests may arrive. The
wait ends early with the deadline, or with the loss of the learner, which then uses other servers.
Invariant: no group and no weight sync starts after the learner has been notified.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from inference_server.engine.containment import log_unexpected
from inference_server.engine.supervisor import EngineSupervisor
from inference_server.requests import Groups
from inference_server.weight_update import WeightUpdates
from protocol.messages import PushBegin, PushFailed

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05
UNREACHED_S = 1.0
"""Seconds without a delivery after which the learner counts as gone or disconnected. A disconnected learner
sends Hello again and gets no answer. A full send queue frees up sooner than that."""
REASON = "the server is draining: it is shutting down, finishes its running work and accepts no new work"


class Drain:
    """Drain of one server. `run` returns when the server may exit."""

    def __init__(
        self, life: EngineSupervisor, pushes: WeightUpdates, groups: Groups, timeout_s: float,
        notify: Callable[[], Awaitable[object]], unreached_s: Callable[[], float],
    ) -> None:  # fmt: skip
        """Connect the drain to the server's parts.

        The first callable sends the learner a Pulse. `unreached_s` returns for how many seconds the learner's
        connection has accepted nothing.
        """
        self._life, self._pushes, self._groups, self._timeout_s = life, pushes, groups, timeout_s
        self._notify, self._unreached_s = notify, unreached_s
        self.is_draining = False
        self._has_farewell = False
        """True once the learner has sent Farewell during the drain."""
        self.num_requests: Callable[[], int] = lambda: 0
        """Callable that returns the number of running requests of OpenAI API clients."""

    async def run(self) -> None:
        self.is_draining = True
        deadline = time.monotonic() + self._timeout_s
        log.info(
            "draining for up to %g s (server.drain_timeout_s): %s; a second signal stops the server at once",
            self._timeout_s, self._pending() or "nothing is running",
        )  # fmt: skip
        with log_unexpected("notifying the learner of the drain"):
            await self._notify()
        await self._groups.return_groups(include_started=False)
        while pending := self._pending():
            if time.monotonic() > deadline:
                log.warning("not drained after %g s (server.drain_timeout_s): %s", self._timeout_s, pending)
                return
            # Running work would wait for weights that no learner sends any more.
            if self._pushes.state == "torn":
                await self._groups.return_groups(include_started=True)
            await asyncio.sleep(POLL_INTERVAL_S)
        log.info("drained")

    def on_farewell(self) -> None:
        """Record the learner's Farewell: no further requests follow."""
        self._has_farewell = self.is_draining

    def refusal_of(self, begin: PushBegin) -> PushFailed:
        """Return the answer to a learner that does not know of the drain yet."""
        is_intact = self._pushes.state != "torn"
        return PushFailed(
            session=begin.session, version=begin.version, state="draining", message=REASON, weights_intact=is_intact
        )

    def _pending(self) -> str:
        """Describe the running work, or return an empty string if there is none."""
        counts = {"/v1 requests": self.num_requests()}
        if self._unreached_s() < UNREACHED_S:
            counts |= {"engine calls": self._life.num_working, "groups without an Ack": self._groups.num_unacked}
            counts |= {"learners without a Farewell": int(not self._has_farewell)}
        return ", ".join(f"{what}: {count}" for what, count in counts.items() if count)
