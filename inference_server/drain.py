"""The end of a server that was told to end: it takes nothing more on, finishes what it has begun, and is then over.

    told ─▶ Pulse(is_draining) ─▶ what has not begun is handed back ─▶ groups, scores, a push, requests of /v1 end ─▶ Acks ─▶ over
                 └── Farewell of the learner ──────────────────────────┘ server.drain_timeout_s: over all the same

Between the signal (shutdown.py) and the server's parts. Waits for the learner's Farewell, before which it may have asked for more, and for
what is under way; unblocked by their end, the deadline, or the loss of the learner, which then asks others. Invariant: once the
learner has been told no group and no push is begun.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from inference_server.engine.containment import log_unexpected
from inference_server.engine.supervisor import EngineLife
from inference_server.requests import Groups
from inference_server.weight_update import Pushes
from protocol.messages import PushBegin, PushFailed

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
UNREACHED_S = 1.0
"""A learner that could not be reached for so long is gone, or has lost this server: it says Hello, and is not answered. A queue that is
full lets something through sooner."""
REASON = "the server is draining: it was told to end, finishes what it has begun and takes nothing more on"


def _none() -> int:
    return 0


class Drain:
    """Of one server; `run` returns when it may end."""

    def __init__(
        self, life: EngineLife, pushes: Pushes, groups: Groups, timeout_s: float,
        tell: Callable[[], Awaitable[object]], unreached_s: Callable[[], float],
    ) -> None:  # fmt: skip
        """`tell` sends the learner a Pulse; `unreached_s`: for so long nothing could be handed to its connection."""
        self._life, self._pushes, self._groups, self._timeout_s = life, pushes, groups, timeout_s
        self._tell, self._unreached_s = tell, unreached_s
        self.is_draining = False
        self._is_heard = False
        """The learner has said Farewell."""
        self.num_requests: Callable[[], int] = _none
        """Of the OpenAI API's clients, under way."""

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
            if self._pushes.state == "torn":  # what has begun would wait for weights that nobody sends any more
                await self._groups.hand_back(also_begun=True)
            await asyncio.sleep(LOOK_EVERY_S)
        log.info("drained")

    def heard(self) -> None:
        """What the learner has asked for by now is all."""
        self._is_heard = self.is_draining

    def refusal_of(self, begin: PushBegin) -> PushFailed:
        """To a learner that has not heard of it yet."""
        is_intact = self._pushes.state != "torn"
        return PushFailed(
            epoch=begin.epoch, version=begin.version, state="draining", message=REASON, weights_intact=is_intact
        )

    def _left(self) -> str:
        """What is under way, in words; empty if nothing."""
        counts = {"requests of /v1": self.num_requests()}
        if self._unreached_s() < UNREACHED_S:
            counts |= {"calls into the engine": self._life.num_working, "groups to be acked": self._groups.num_unacked}
            counts |= {"learner that has not heard of it": int(not self._is_heard)}
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)
