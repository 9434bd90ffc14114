"""Pool of agent processes, one for each episode that is played.

This sits between `agent_player.py` and `agent_process.py`, as environments/pool.py does for environments.
Invariant: a process plays one episode at a time, and one that has ended costs only its own episode.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from learner.config import EnvironmentConfig
from learner.environments.process import ProcessFailure
from learner.gateway.agent_process import AgentProcess
from learner.sandbox.memory_watch import MemoryWatch
from protocol.errors import ConfigError


class Agents:
    """Agents of one run, used in its event loop."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._free: list[AgentProcess] = []
        self._all: set[AgentProcess] = set()
        self._room = asyncio.Semaphore(config.max_concurrent)
        self.is_closed = False
        self._watch = MemoryWatch(config.max_memory_mib, lambda: self._all)

    async def check(self) -> None:
        """Start one process to check that it works. Raises ConfigError if it does not."""
        try:
            process = self._start()
        except OSError as error:
            raise ConfigError(
                f"learner.environment.python = {self._config.python!r} cannot be started: {error}; name an interpreter"
            ) from error
        trouble = await process.load()
        if isinstance(trouble, ProcessFailure):
            raise ConfigError(f"{self._config.named}: {trouble.problem}")
        self._free.append(process)

    @asynccontextmanager
    async def seat(self) -> AsyncIterator[AgentProcess]:
        """Lease a process for one episode, in order of arrival."""
        async with self._room:
            process = self._take() or self._start()
            try:
                yield process
            finally:
                self._give_back(process)

    def close(self) -> None:
        """Kill all processes, even during an episode, which is then canceled."""
        self.is_closed = True
        self._watch.close()
        for process in self._all:
            process.close()

    def _take(self) -> AgentProcess | None:
        """Return a free process, if there is one. Drop those that were killed while free."""
        while self._free:
            process = self._free.pop()
            if process.is_usable:
                return process
            self._forget(process)
        return None

    def _start(self) -> AgentProcess:
        if self.is_closed:
            raise asyncio.CancelledError  # the run is ending, and the episode with it
        process = AgentProcess(self._config)
        self._all.add(process)
        return process

    def _give_back(self, process: AgentProcess) -> None:
        if process.is_usable:
            self._free.append(process)
        else:
            self._forget(process)

    def _forget(self, process: AgentProcess) -> None:
        process.close()
        self._all.discard(process)
