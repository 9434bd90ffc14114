"""The processes of the environments that are played at once. Between the player, in the event loop, and process.py.

    seat ─▶ (wait for a free process) ─▶ ask, ask, … ─▶ free again, or replaced where it has ended or was not waited for

Invariant: an instance plays one episode at a time, and a process that has ended costs its own episode alone.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from learner.config import EnvironmentConfig
from learner.environments.host import Answer, Order
from learner.environments.process import EnvironmentProcess, Trouble
from learner.memory_watch import MemoryWatch
from protocol.errors import ConfigError

log = logging.getLogger(__name__)


class Seat:
    """A process for the time of one episode."""

    def __init__(self, process: EnvironmentProcess, threads: ThreadPoolExecutor) -> None:
        self.process, self._threads = process, threads
        self.owes_answer = False
        """It was asked, and nobody waited for what it says."""

    async def ask(self, order: Order) -> Answer | Trouble:
        self.owes_answer = True
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self.process.ask, order)
        self.owes_answer = False
        return answer


class Environments:
    """Of one run, used in its event loop; close it from anywhere."""

    def __init__(self, config: EnvironmentConfig, *, takes_text: bool) -> None:
        """Start one process, to see whether it can be done. `takes_text`: turns go as they are to the one method of the class.
        Raises ConfigError.
        """
        self._config, self.takes_text = config, takes_text
        self._free: list[EnvironmentProcess] = []
        self._all: set[EnvironmentProcess] = set()
        self._room = asyncio.Semaphore(config.max_concurrent)
        self._threads = ThreadPoolExecutor(config.max_concurrent, "environment")
        self._is_closed = False
        self._watch = MemoryWatch(config.max_memory_mib, lambda: self._all)
        first = self._start()
        trouble = first.load()
        if trouble is not None:
            self.close()
            raise ConfigError(f"{config.named}: {trouble.problem}")
        self._free.append(first)

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[Seat]:
        """Whoever waited longest is next."""
        async with self._room:
            seat = Seat(self._take() or self._start(), self._threads)
            try:
                yield seat
            finally:
                if seat.process.is_usable and not seat.owes_answer:
                    self._free.append(seat.process)
                else:
                    self._forget(seat.process)

    def close(self) -> None:
        """Kill all, whatever they do; calls that wait come back."""
        self._is_closed = True
        self._watch.close()
        for process in list(self._all):
            process.kill()
        self._threads.shutdown(wait=False)

    def _take(self) -> EnvironmentProcess | None:
        """One that is free; what was killed while it waited is forgotten."""
        while self._free:
            process = self._free.pop()
            if process.is_usable:
                return process
            self._forget(process)
        return None

    def _forget(self, process: EnvironmentProcess) -> None:
        process.kill()
        self._all.discard(process)

    def _start(self) -> EnvironmentProcess:
        if self._is_closed:
            raise asyncio.CancelledError  # the run ends, and the episode with it
        process = EnvironmentProcess(self._config, takes_text=self.takes_text)
        self._all.add(process)
        return process
