"""Drain of a server: it accepts no new work, finishes the work it has, and ends.

    signal ─▶ Pulse(is_draining) ─▶ hand back waiting groups ─▶ finish groups, scores, sync, /v1 ─▶ Acks
                 └── Farewell of the learner ────────────────────┘  server.drain_timeout_s: end regardless

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

LOOK_EVERY_S = 0.05
UNREACHED_S = 1.0
"""Seconds without a delivery after which the learner counts as gone or disconnected. A disconnected learner
sends Hello again and gets no answer. A full send queue frees up sooner than that."""
REASON = "the server is draining: it was told to end, finishes what it has begun and takes nothing more on"


def _none() -> int:
    return 0


class Drain:
    """Drain of one server. `run` returns when the server may end."""

    def __init__(
        self, life: EngineSupervisor, pushes: WeightUpdates, groups: Groups, timeout_s: float,
        tell: Callable[[], Awaitable[object]], unreached_s: Callable[[], float],
    ) -> None:  # fmt: skip
        """Connect the drain to the server's parts.

        The first callable sends the learner a Pulse. `unreached_s` returns for how many seconds the learner's
        connection has accepted nothing.
        """
        self._life, self._pushes, self._groups, self._timeout_s = life, pushes, groups, timeout_s
        self._tell, self._unreached_s = tell, unreached_s
        self.is_draining = False
        self._is_heard = False
        """True once the learner has sent Farewell during the drain."""
        self.num_requests: Callable[[], int] = _none
        """Callable that returns the number of running requests of OpenAI API clients."""

    async def run(self) -> None:
        self.is_draining = True
        deadline = time.monotonic() + self._timeout_s
        log.info(
            "draining for up to %g s (server.drain_timeout_s): %s; told once more it ends at once",
            self._timeout_s, self._left() or "nothing is under way",
        )  # fmt: skip
        with log_unexpected("telling the learner that the server drains"):
            await self._tell()
        await self._groups.hand_back(also_begun=False)
        while left := self._left():
            if time.monotonic() > deadline:
                log.warning("not drained after %g s (server.drain_timeout_s): %s", self._timeout_s, left)
                return
            # Running work would wait for weights that no learner sends any more.
            if self._pushes.state == "torn":
                await self._groups.hand_back(also_begun=True)
            await asyncio.sleep(LOOK_EVERY_S)
        log.info("drained")

    def heard(self) -> None:
        """Record the learner's Farewell: no further requests follow."""
        self._is_heard = self.is_draining

    def refusal_of(self, begin: PushBegin) -> PushFailed:
        """Return the answer to a learner that does not know of the drain yet."""
        is_intact = self._pushes.state != "torn"
        return PushFailed(
            epoch=begin.epoch, version=begin.version, state="draining", message=REASON, weights_intact=is_intact
        )

    def _left(self) -> str:
        """Describe the running work, or return an empty string if there is none."""
        counts = {"requests of /v1": self.num_requests()}
        if self._unreached_s() < UNREACHED_S:
            counts |= {"calls into the engine": self._life.num_working, "groups to be acked": self._groups.num_unacked}
            counts |= {"learner that has not heard of it": int(not self._is_heard)}
        return ", ".join(f"{what}: {count}" for what, count in counts.items() if count)
