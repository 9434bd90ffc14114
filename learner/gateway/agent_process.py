"""The learner's end of an agent's process: start and play episodes.

`agent_host.py` runs in the process, which shares only a socket with the learner. It can use any interpreter.
"""

import asyncio
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from learner.config import EnvironmentConfig
from learner.environments.process import limits_of
from learner.sandbox.pool import ProcessPool
from learner.sandbox.process import STARTUP_REMEDY, STARTUP_TIMEOUT_S, ProcessFailure, SandboxProcess
from learner.sandbox.start import ScriptChild
from protocol.errors import ConfigError

HOST = Path(__file__).with_name("agent_host.py")
MAX_ANSWER_BYTES = 16 << 20


class AgentReward(msgspec.Struct, frozen=True):
    """Reward that an agent returned, possibly by completion id, or None."""

    reward: float | dict[str, float] | None


class AgentAnswer(msgspec.Struct, frozen=True):
    """Answer in the format of agent_host.py."""

    reward: float | dict[str, float] | None = None
    problem: str | None = None


class EpisodeRequest(msgspec.Struct, frozen=True):
    """EpisodeRequest to play an episode."""

    row: dict[str, Any]
    base_url: str
    api_key: str


class AgentProcess(SandboxProcess):
    """A process for one agent, used in the learner's event loop."""

    channel = "socket"

    def __init__(self, config: EnvironmentConfig) -> None:
        """Start the process.

        Raises:
            ConfigError: If its interpreter cannot be started.
        """
        kind = "command" if config.command is not None else "agent"
        self._is_kept = kind == "agent"  # what a command leaves running ends with its process
        python, spec = config.python or sys.executable, config.command or config.agent or ""
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                child = ScriptChild(python, HOST, [theirs.fileno()], [kind, spec], without_proxy(config.gateway_host))
            except ConfigError:
                self._socket.close()
                raise
        super().__init__(child, limits_of(config))
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def load(self) -> ProcessFailure | None:
        """Wait until the agent is loaded, and return the ProcessFailure if that fails."""
        if self._streams is not None:
            return None
        self._streams = await asyncio.open_connection(sock=self._socket, limit=MAX_ANSWER_BYTES)
        answer = await self._answer(STARTUP_TIMEOUT_S, STARTUP_REMEDY)
        if isinstance(answer, ProcessFailure):
            self.kill()
            return answer
        return None

    async def play(self, request: EpisodeRequest, deadline_s: float) -> AgentReward | ProcessFailure:
        """Play one episode and return the agent's reward."""
        self.has_pending_answer = True
        answer = await self.load() or await self._episode(request, deadline_s)
        self.has_pending_answer = False
        if not self._is_kept:
            self.kill()
        return answer

    def close(self) -> None:
        """Kill the process and close its socket. Call this in the event loop."""
        self.kill()
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].close()

    async def _episode(self, request: EpisodeRequest, deadline_s: float) -> AgentReward | ProcessFailure:
        assert self._streams is not None
        self._streams[1].write(msgspec.json.encode(request, enc_hook=_plain) + b"\n")
        return await self._answer(deadline_s, "make it faster or raise learner.environment.episode_deadline_s")

    async def _answer(self, timeout_s: float, remedy: str) -> AgentReward | ProcessFailure:
        assert self._streams is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._streams[0].readline()
        except TimeoutError:
            return self.end_overdue(timeout_s, remedy)
        except (OSError, ValueError):  # a reset, or more than MAX_ANSWER_BYTES
            line = b""
        if not line:
            return self.end_closed()
        try:
            answer = msgspec.json.decode(line, type=AgentAnswer)
        except msgspec.DecodeError as error:
            return self.end_invalid(error)
        return AgentReward(answer.reward) if answer.problem is None else ProcessFailure("failed", answer.problem)


def start_agent_pool(config: EnvironmentConfig) -> ProcessPool[AgentProcess]:
    """Return the pool of a run's agents, used in its event loop."""
    return ProcessPool(partial(AgentProcess, config), config.max_memory_mib, config.max_concurrent)


async def check_agent(config: EnvironmentConfig, agents: ProcessPool[AgentProcess]) -> None:
    """Start one process to check that the agent works.

    Raises:
        ConfigError: If the process cannot load the agent.
    """
    process = agents.start()
    failure = await process.load()
    if failure is not None:
        raise ConfigError(f"{config.named}: {failure.message}")
    agents.release(process)


def without_proxy(host: str) -> dict[str, str]:
    """Return the environment variables for an agent: no proxy applies to the gateway."""
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    exempt = f"{known},{host}" if known else host
    return {**os.environ, "NO_PROXY": exempt, "no_proxy": exempt}


def _plain(value: Any) -> Any:
    """Convert a column's value that JSON cannot represent."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
