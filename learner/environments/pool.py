"""Environments of a run, each in a process, leased for one episode at a time.

This sits between the player, in the event loop, and `process.py`.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from learner.config import EnvironmentConfig
from learner.environments.host import Answer, Command
from learner.environments.process import EnvironmentProcess
from learner.sandbox.pool import ProcessPool
from learner.sandbox.process import ProcessFailure
from protocol.errors import ConfigError


class Lease:
    """A process, leased for one episode."""

    def __init__(self, process: EnvironmentProcess, threads: ThreadPoolExecutor) -> None:
        self.process, self._threads = process, threads

    async def ask(self, command: Command) -> Answer | ProcessFailure:
        self.process.has_pending_answer = True
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self.process.command, command)
        self.process.has_pending_answer = False
        return answer


class Environments:
    """Environments of one run, used in its event loop. Any thread may call `close`."""

    def __init__(self, config: EnvironmentConfig, *, takes_text: bool) -> None:
        """Start one process to check that it works.

        `takes_text`: turns go unchanged to the only method of the class.

        Raises:
            ConfigError: If the process cannot load the environment.
        """
        self.takes_text = takes_text
        start = partial(EnvironmentProcess, config, takes_text=takes_text)
        self._pool = ProcessPool(start, config.max_memory_mib, config.max_concurrent)
        self._threads = ThreadPoolExecutor(config.max_concurrent, "environment")
        first = self._pool.start()
        failure = first.load()
        if failure is not None:
            self.close()
            raise ConfigError(f"{config.named}: {failure.message}")
        self._pool.release(first)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Lease]:
        """Lease a process for one episode, in order of arrival."""
        async with self._pool.lease() as process:
            yield Lease(process, self._threads)

    def close(self) -> None:
        """Kill all processes, even in the middle of a call. Pending calls return."""
        self._pool.close()
        self._threads.shutdown(wait=False)
