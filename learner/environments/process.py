"""Environments of a run, each in a process, leased for one episode at a time.

player, in the event loop ─▶ Environments ─▶ EnvironmentProcess ─▶ host.py, in the process
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from learner.config import EnvironmentConfig
from learner.environments.host import ANSWER, Answer, ClassError, Command, Describe, LoadedClass, ToolSchemas, serve
from learner.sandbox.pool import ProcessPool
from learner.sandbox.process import STARTUP_REMEDY, STARTUP_TIMEOUT_S, PipeProcess, ProcessFailure, SandboxLimits
from learner.sandbox.start import fork, run_script
from protocol.errors import ConfigError

OWN_INTERPRETER = Path(__file__).with_name("own_interpreter.py")


class EnvironmentProcess(PipeProcess):
    """A process for one environment. It starts without waiting for the class to load."""

    def __init__(self, config: EnvironmentConfig, *, takes_text: bool) -> None:
        """Start the process.

        Raises:
            ConfigError: Its interpreter cannot be started.
            OSError: The machine cannot start another process now.
        """
        if config.python is None:
            started = fork("environment", __name__, serve, config.factory, config.tools, takes_text)
        else:
            arguments = (config.factory or "", str(takes_text), *config.tools)
            started = run_script(config.python, OWN_INTERPRETER, *arguments)
        super().__init__(*started, limits_of(config))
        self._is_loaded = False

    def load(self) -> ProcessFailure | None:
        """Wait until the class is loaded, and return the ProcessFailure if that fails."""
        if not self._is_loaded:
            answer = self._checked(self.answer(ANSWER, STARTUP_TIMEOUT_S, STARTUP_REMEDY))
            if isinstance(answer, ProcessFailure):
                return answer
            assert isinstance(answer, LoadedClass)
            self.user_files.compare(answer.file_digests)
            self._is_loaded = True
        return None

    def command(self, command: Command) -> Answer | ProcessFailure:
        """Send a command and return its answer. The process has ended after a ProcessFailure."""
        failure = self.load()
        if failure is not None:
            return failure
        if isinstance(command, Describe):
            return self._checked(self.ask(command, ANSWER, STARTUP_TIMEOUT_S, STARTUP_REMEDY))
        return self._checked(self.ask(command, ANSWER, self.limits.timeout_s, self.limits.slow_remedy))

    def _checked(self, answer: Answer | ProcessFailure) -> Answer | ProcessFailure:
        if isinstance(answer, ClassError):
            self.kill()
            return ProcessFailure("failed", answer.problem)
        return answer


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
            ConfigError: The process cannot load the environment.
        """
        start = partial(EnvironmentProcess, config, takes_text=takes_text)
        self._pool = ProcessPool(start, limits_of(config), config.max_concurrent)
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


def limits_of(config: EnvironmentConfig) -> SandboxLimits:
    """Return the limits of a process of an environment or an agent."""
    return SandboxLimits(
        section="learner.environment",
        processes_key="max_concurrent",
        timeout_s=config.timeout_s,
        max_memory_mib=config.max_memory_mib,
    )


def tools_of(config: EnvironmentConfig) -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools.

    Raises:
        ConfigError: The tools cannot be loaded or described.
    """
    process = EnvironmentProcess(config, takes_text=False)
    try:
        answer = process.command(Describe())
    finally:
        process.kill()  # frees what describing has imported
    if isinstance(answer, ProcessFailure):
        raise ConfigError(f"{config.named}: {answer.message}")
    assert isinstance(answer, ToolSchemas)
    return answer.schemas
