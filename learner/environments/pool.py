"""Pool of environment processes, one for each episode that is played.

    seat ─▶ (wait for a free process) ─▶ ask, ask, … ─▶ free again, or replaced if ended or unanswered

This sits between the player, in the event loop, and `process.py`.
Invariant: an instance plays one episode at a time, and a process that has ended costs only its own episode.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from learner.config import EnvironmentConfig
from learner.environments.host import Answer, Command
from learner.environments.process import EnvironmentProcess, ProcessFailure
from learner.sandbox.memory_watch import MemoryWatch
from protocol.errors import ConfigError

log = logging.getLogger(__name__)


class Lease:
    """A process, leased for one episode."""

    def __init__(self, process: EnvironmentProcess, threads: ThreadPoolExecutor) -> None:
        self.process, self._threads = process, threads
        self.owes_answer = False
        """Whether an answer is pending, possibly because the caller stopped waiting."""

    async def ask(self, order: Command) -> Answer | ProcessFailure:
        self.owes_answer = True
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self.process.ask, order)
        self.owes_answer = False
        return answer


class Environments:
    """Environments of one run, used in its event loop. Any thread may call `close`."""

    def __init__(self, config: EnvironmentConfig, *, takes_text: bool) -> None:
        """Start one process to check that it works.

        `takes_text`: turns go unchanged to the only method of the class.

        Raises:
            ConfigError: If the process cannot load the environment.
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
    async def seat(self) -> AsyncIterator[Lease]:
        """Lease a process for one episode, in order of arrival."""
        async with self._room:
            seat = Lease(self._take() or self._start(), self._threads)
            try:
                yield seat
            finally:
                if seat.process.is_usable and not seat.owes_answer:
                    self._free.append(seat.process)
                else:
                    self._forget(seat.process)

    def close(self) -> None:
        """Kill all processes, even in the middle of a call. Pending calls return."""
        self._is_closed = True
        self._watch.close()
        for process in list(self._all):
            process.kill()
        self._threads.shutdown(wait=False)

    def _take(self) -> EnvironmentProcess | None:
        """Return a free process, if there is one. Drop those that were killed while free."""
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
            raise asyncio.CancelledError  # the run is ending, and the episode with it
        process = EnvironmentProcess(self._config, takes_text=self.takes_text)
        self._all.add(process)
        return process
