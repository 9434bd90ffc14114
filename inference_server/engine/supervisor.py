"""Supervision of the engine: its death stops its work, and a bounded number of restarts follow.

    alive ─▶ dead (EngineDead in work or a check each second) ─▶ cancel work ─▶ on_death ─▶ restart ─▶ alive
                                                           └▶ one too many: EngineDead, which stops the server

StallDetector detects an engine that has work and makes no progress. A call into the engine that misses its
deadline (`in_time`) counts as a death: its cause would block every later call.
Invariant: no work continues from one engine to the next.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TypeVar

from inference_server.engine.containment import Fail, log_unexpected, record_unexpected, run_contained
from inference_server.engine.interface import Engine, EngineDead, WorkerInfo
from protocol.console import counted
from protocol.errors import SlipstreamError

log = logging.getLogger(__name__)
T = TypeVar("T")
CHECK_INTERVAL_S = 1.0
WORKERS_TIMEOUT_S = 60.0
RESTARTS_WINDOW_S = 3600.0
"""Window for counting deaths, in seconds."""


async def in_time(call: Awaitable[T], timeout_s: float, doing: str, knob: str) -> T:
    """Await a call into the engine.

    Raises:
        EngineDead: The call missed its deadline. The error message names `knob`, the key of the deadline.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise EngineDead(f"the engine did not answer within {timeout_s:g} s while {doing} ({knob})") from error


class EngineSupervisor:
    """State of the engine, and the work that needs it.

    `keep` runs until the engine has died more often than `max_restarts`.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: asyncio.TaskGroup,
        max_restarts: int,
        look: Callable[[], None],
        on_death: Callable[[], Awaitable[None]],
    ) -> None:
        """Create the state of an engine that has not been checked yet.

        While the engine is alive, `look` is called each second. It raises EngineDead to report a death.
        """
        self._engine, self._tasks, self._max_restarts = engine, tasks, max_restarts
        self._look, self._on_death = look, on_death
        self._work: set[asyncio.Task[None]] = set()
        self._death = asyncio.Event()
        self._reason = ""
        """Reason of the death, from the code that detected it."""
        self._died_at: list[float] = []
        self.alive = asyncio.Event()
        self.num_restarts = 0
        self.workers: Sequence[WorkerInfo] = ()

    @property
    def is_alive(self) -> bool:
        return self.alive.is_set()

    @property
    def why_not_alive(self) -> str | None:
        """Description of the current outage, or None while the engine is alive."""
        if self.is_alive:
            return None
        return f"the engine is restarting: {self._reason}" if self._reason else "the engine is starting"

    @property
    def num_working(self) -> int:
        """Number of running groups, scores and weight syncs."""
        return len(self._work)

    @property
    def transports(self) -> list[str]:
        """Transports that every worker offers."""
        first, *others = [worker.transports for worker in self.workers]
        return [transport for transport in first if all(transport in other for other in others)]

    def spawn(self, work: Coroutine[None, None, None], name: str, fail: Fail | None = None) -> asyncio.Task[None]:
        """Run work that needs the engine, and cancel it when the engine dies.

        `fail` is called with the description of an unexpected exception.
        """
        task = self._tasks.create_task(self._until_death(work, f"working on {name}", fail), name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        # Python would warn of a coroutine that was canceled before its start and never awaited.
        task.add_done_callback(lambda _: work.close())
        return task

    async def keep(self) -> None:
        """Restart the engine whenever it has died. Raises EngineDead if it dies too often."""
        while True:
            try:
                if self._died_at:
                    await self._restart()
                await self._live()
            except EngineDead as death:
                self._count(death)

    async def _restart(self) -> None:
        try:
            await self._engine.restart()
        except Exception as error:
            if not isinstance(error, SlipstreamError):
                record_unexpected(error, "restarting the engine")
            raise EngineDead(f"the engine could not be restarted: {error}") from error
        self.num_restarts += 1

    async def _live(self) -> None:
        """Run until the engine has died and all its work has ended.

        Raises:
            EngineDead: The engine has died.
        """
        self.workers = await self._query_workers()
        self._death.clear()
        self.alive.set()
        if self._died_at:
            log.info("restarted the engine after %.1f s (without synced weights)", time.monotonic() - self._died_at[-1])
        try:
            await self._wait_for_death()
        except EngineDead as death:
            self._reason = str(death)
            self.alive.clear()
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
            with log_unexpected("notifying the learner of the engine's death"):
                await self._on_death()
            raise

    async def _query_workers(self) -> Sequence[WorkerInfo]:
        """Query the workers, and check meanwhile that the engine is alive.

        vLLM's calls into an engine that dies meanwhile never return.
        """
        workers = asyncio.ensure_future(self._engine.workers())
        try:
            async with asyncio.timeout(WORKERS_TIMEOUT_S):
                while not (await asyncio.wait([workers], timeout=CHECK_INTERVAL_S))[0]:
                    self._engine.check_alive()
        except TimeoutError as error:
            raise EngineDead(f"the engine's workers did not answer within {WORKERS_TIMEOUT_S:g} s") from error
        finally:
            workers.cancel()
        try:
            return workers.result()
        except EngineDead:
            raise
        except Exception as error:
            record_unexpected(error, "querying the devices of the engine's workers")
            raise EngineDead(f"the engine's workers did not report their devices: {error}") from error

    async def _until_death(self, work: Coroutine[None, None, None], doing: str, fail: Fail | None) -> None:
        try:
            await run_contained(work, doing, fail)
        except EngineDead as dead:
            self._reason = str(dead)
            self._death.set()

    async def _wait_for_death(self) -> None:
        while not self._death.is_set():
            with log_unexpected("checking the engine"):
                self._engine.check_alive()
                self._look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._death.wait()
        raise EngineDead(self._reason)

    def _count(self, death: EngineDead) -> None:
        """Count a death. Raises EngineDead if there have been too many."""
        now = time.monotonic()
        self._died_at = [at for at in self._died_at if now - at <= RESTARTS_WINDOW_S] + [now]
        num_deaths = len(self._died_at)
        if num_deaths > self._max_restarts:
            raise EngineDead(
                f"{death}. This is death {num_deaths} of the engine within an hour (server.max_engine_restarts = "
                f"{self._max_restarts}). Restart the server: the learner will sync weights again"
            ) from death
        log.warning(
            "%s. Restarting the engine (%d of %d within an hour, server.max_engine_restarts)",
            death, num_deaths, self._max_restarts,
        )  # fmt: skip


class StallDetector:
    """Detector of an engine that makes no progress, polled by the caller.

    It watches all work of the engine, so requests that wait for others are no stall.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float], timeout_s: float) -> None:
        """Create the detector. `clock` stops while generation is paused."""
        self._engine, self._clock, self._timeout_s = engine, clock, timeout_s
        self._moved: dict[int, tuple[int | None, float]] = {}
        """Step counter of each replica, with the time of its last change."""

    def check(self, num_requests: int) -> None:
        """Check for a stall, given the number of running groups and scores.

        Raises:
            EngineDead: Requests are running, and a replica with requests made no progress for too long.
        """
        now, steps = self._clock(), self._engine.num_steps
        for replica, num_steps in enumerate(steps):
            before, moved_at = self._moved.get(replica, (None, now))
            if num_requests == 0 or num_steps is None or num_steps != before:
                self._moved[replica] = (num_steps, now)
            elif now - moved_at > self._timeout_s:
                who = "the engine" if len(steps) == 1 else f"replica {replica}, which has requests,"
                raise EngineDead(
                    f"{who} sampled no token for {self._timeout_s:g} s (server.stall_timeout_s) with "
                    f"{counted(num_requests, 'request')} running"
                )
