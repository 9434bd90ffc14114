"""The lives of the engine: it dies, what it was doing ends with it, it is started again, a bounded number of times.

    alive ─▶ dead (work raises EngineDead, or a look each second) ─▶ its work is cancelled ─▶ on_death ─▶ restart ─▶ alive
                                                    one death too many: EngineDead, which ends the server

StallWatch finds an engine that has work and makes no progress; requests that wait for others are no stall.

consumes  coroutines that need the engine (spawn)      waits for  a death; the restart, whose deadline is start_timeout_s
Invariant: nothing that was begun in one life goes on in the next. A call into the engine that does not end in time (`in_time`)
is its death: whatever it waits for there would keep every later call waiting.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TypeVar

from inference_server.engine.containment import Fail, log_unexpected, record_unexpected, run_contained
from inference_server.engine.interface import Engine, EngineDead, WorkerPlace
from protocol.errors import SlipstreamError

log = logging.getLogger(__name__)
T = TypeVar("T")
LOOK_INTERVAL_S = 1.0
PLACES_TIMEOUT_S = 60.0
RESTARTS_WINDOW_S = 3600.0
"""Deaths further apart are not counted together."""


async def in_time(call: Awaitable[T], timeout_s: float, doing: str, knob: str) -> T:
    """Await a call into the engine. Raises EngineDead past the deadline, which the error says can be raised by `knob`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise EngineDead(f"the engine did not answer within {timeout_s:g} s while {doing} ({knob})") from error


class EngineLife:
    """Knows whether the engine is alive. `keep` runs until it has died more often than `max_restarts`."""

    def __init__(
        self,
        engine: Engine,
        tasks: asyncio.TaskGroup,
        max_restarts: int,
        look: Callable[[], None],
        on_death: Callable[[], Awaitable[None]],
    ) -> None:
        """`look` is called each second of a life, and raises EngineDead to end it."""
        self._engine, self._tasks, self._max_restarts = engine, tasks, max_restarts
        self._look, self._on_death = look, on_death
        self._work: set[asyncio.Task[None]] = set()
        self._death = asyncio.Event()
        self._reason = ""
        """Why it died, as whoever noticed has said."""
        self._died_at: list[float] = []
        self.alive = asyncio.Event()
        self.num_restarts = 0
        self.places: Sequence[WorkerPlace] = ()

    @property
    def is_alive(self) -> bool:
        return self.alive.is_set()

    @property
    def why_not_alive(self) -> str | None:
        """In words; None while it is."""
        if self.is_alive:
            return None
        return f"the engine is being started again: {self._reason}" if self._reason else "the engine is being started"

    @property
    def num_working(self) -> int:
        """Of what was spawned and has not ended: groups, scores, pushes."""
        return len(self._work)

    @property
    def transports(self) -> list[str]:
        """What every worker offers."""
        first, *others = [place.transports for place in self.places]
        return [transport for transport in first if all(transport in other for other in others)]

    def spawn(self, work: Coroutine[None, None, None], name: str, fail: Fail | None = None) -> asyncio.Task[None]:
        """Run what needs the engine, for as long as this life lasts; `fail` is told of an exception of its own."""
        task = self._tasks.create_task(self._until_death(work, f"working on {name}", fail), name=name)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        task.add_done_callback(lambda _: work.close())  # cancelled before it began, it would else be called forgotten
        return task

    async def keep(self) -> None:
        """Start the engine again whenever it has died. Raises EngineDead for one death too many."""
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
                record_unexpected(error, "starting the engine again")
            raise EngineDead(f"the engine could not be started again: {error}") from error
        self.num_restarts += 1

    async def _live(self) -> None:
        """Raises EngineDead when the life is over, and all that was begun in it."""
        self.places = await self._ask_for_places()
        self._death.clear()
        self.alive.set()
        if self._died_at:
            log.info("the engine is back after %.1f s, without weights", time.monotonic() - self._died_at[-1])
        try:
            await self._wait_for_death()
        except EngineDead as death:
            self._reason = str(death)
            self.alive.clear()
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
            with log_unexpected("telling the learner of the engine's death"):
                await self._on_death()
            raise

    async def _ask_for_places(self) -> Sequence[WorkerPlace]:
        """vLLM's calls into an engine that dies meanwhile do not end by themselves."""
        asking = asyncio.ensure_future(self._engine.places())
        try:
            async with asyncio.timeout(PLACES_TIMEOUT_S):
                while not (await asyncio.wait([asking], timeout=LOOK_INTERVAL_S))[0]:
                    self._engine.check_alive()
        except TimeoutError as error:
            raise EngineDead(f"the engine's workers did not answer within {PLACES_TIMEOUT_S:g} s") from error
        finally:
            asking.cancel()
        try:
            return asking.result()
        except EngineDead:
            raise
        except Exception as error:
            record_unexpected(error, "asking the engine's workers where they are")
            raise EngineDead(f"the engine's workers could not be asked where they are: {error}") from error

    async def _until_death(self, work: Coroutine[None, None, None], doing: str, fail: Fail | None) -> None:
        try:
            await run_contained(work, doing, fail)
        except EngineDead as dead:
            self._reason = str(dead)
            self._death.set()

    async def _wait_for_death(self) -> None:
        while not self._death.is_set():
            with log_unexpected("looking at the engine"):
                self._engine.check_alive()
                self._look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_INTERVAL_S):
                    await self._death.wait()
        raise EngineDead(self._reason)

    def _count(self, death: EngineDead) -> None:
        """Raises EngineDead for one death too many."""
        now = time.monotonic()
        self._died_at = [at for at in self._died_at if now - at <= RESTARTS_WINDOW_S] + [now]
        num_deaths = len(self._died_at)
        if num_deaths > self._max_restarts:
            raise EngineDead(
                f"{death}. That was death {num_deaths} within an hour (server.max_engine_restarts = {self._max_restarts}). "
                "Restart the server: the learner will push again"
            ) from death
        log.warning(
            "%s. Starting it again, %d of %d within an hour (server.max_engine_restarts)",
            death, num_deaths, self._max_restarts,
        )  # fmt: skip


class StallWatch:
    """To be looked at again and again. Looks at all that the engine does, so requests that wait for others are no stall."""

    def __init__(self, engine: Engine, clock: Callable[[], float], timeout_s: float) -> None:
        """`clock` stands still while nothing may be generated."""
        self._engine, self._clock, self._timeout_s = engine, clock, timeout_s
        self._moved: dict[int, tuple[int | None, float]] = {}
        """By replica: its steps when they were last seen to change, and when that was."""

    def look(self, num_groups: int) -> None:
        """Raises EngineDead when groups are running and a replica that has requests has done nothing for too long."""
        now, steps = self._clock(), self._engine.num_steps
        for replica, num_steps in enumerate(steps):
            before, moved_at = self._moved.get(replica, (None, now))
            if num_groups == 0 or num_steps is None or num_steps != before:
                self._moved[replica] = (num_steps, now)
            elif now - moved_at > self._timeout_s:
                who = "" if len(steps) == 1 else f", replica {replica} has requests"
                raise EngineDead(
                    f"the engine has {num_groups} groups to work on{who} and gave no token for {self._timeout_s:g} s "
                    "(server.stall_timeout_s)"
                )
