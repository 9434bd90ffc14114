"""The learner's end of an agent's process: start, play episodes, kill.

`agent_host.py` runs in the process, which shares only a socket with the learner. It can use any interpreter.
Invariant: a call returns at its deadline, even if the process misbehaves or is killed. A process that has not
answered by then is killed.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from learner.config import EnvironmentConfig
from learner.environments.process import EXIT_WAIT_S, STARTUP_TIMEOUT_S, ProcessFailure, too_large
from learner.sandbox.descendants import kill_with_descendants

HOST = Path(__file__).with_name("agent_host.py")
MAX_ANSWER_BYTES = 16 << 20


class Rewarded(msgspec.Struct, frozen=True):
    """Reward that an agent returned, possibly by completion id, or None."""

    reward: float | dict[str, float] | None


class Answer(msgspec.Struct, frozen=True):
    """Answer in the format of agent_host.py."""

    reward: float | dict[str, float] | None = None
    problem: str | None = None


class Order(msgspec.Struct, frozen=True):
    """Order to play an episode."""

    row: dict[str, Any]
    base_url: str
    api_key: str


class AgentProcess:
    """A process for one agent, used in the learner's event loop."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Start the process. Raises OSError if the interpreter does not exist."""
        kind = "command" if config.command is not None else "agent"
        self._is_kept = kind == "agent"  # what a command leaves running ends with its process
        self._is_killed = self._is_too_large = False
        self._config = config
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [config.python or sys.executable, str(HOST), str(theirs.fileno()), kind, config.command or config.agent or ""],
                    pass_fds=[theirs.fileno()], start_new_session=True, env=without_proxy(config.gateway_host), stdin=subprocess.DEVNULL,
                    stdout=2,  # the learner's stdout may carry a command's output (`--json`)
                )  # fmt: skip
            except OSError:
                self._socket.close()
                raise
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def is_usable(self) -> bool:
        """True if the process can play another episode."""
        return not self._is_killed and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    async def load(self) -> ProcessFailure | None:
        """Wait until the agent is loaded, and return the ProcessFailure if that fails."""
        if self._streams is not None:
            return None
        self._streams = await asyncio.open_connection(sock=self._socket, limit=MAX_ANSWER_BYTES)
        answer = await self._answer(
            STARTUP_TIMEOUT_S, "which importing it took; move slow work out of the module's top level"
        )
        if isinstance(answer, ProcessFailure):
            self.kill()
            return answer
        return None

    async def play(self, order: Order, deadline_s: float) -> Rewarded | ProcessFailure:
        """Play one episode and return the agent's reward."""
        trouble = await self.load()
        if trouble is not None:
            return trouble
        assert self._streams is not None
        self._streams[1].write(msgspec.json.encode(order, enc_hook=_plain) + b"\n")
        answer = await self._answer(deadline_s, "the most of an episode (learner.environment.episode_deadline_s)")
        if not self._is_kept:
            self.kill()
        return answer

    def kill(self) -> None:
        """Kill the process and everything that it has started."""
        if self._is_killed:  # its pid may belong to another process by now
            return
        self._is_killed = True
        self._kill_all()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_WAIT_S)

    def end_as_too_large(self) -> None:
        """Kill the process because it uses too much memory. Any thread may call this.

        The event loop notices the end of the process.
        """
        self._is_too_large = True
        self._kill_all()

    def _kill_all(self) -> None:
        kill_with_descendants(self.pid)

    def close(self) -> None:
        """Kill the process and close its socket. Call this in the event loop."""
        self.kill()
        if self._streams is None:
            self._socket.close()
        else:
            self._streams[1].close()

    async def _answer(self, timeout_s: float, limit: str) -> Rewarded | ProcessFailure:
        assert self._streams is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._streams[0].readline()
        except asyncio.CancelledError:
            self.kill()  # otherwise the next episode would read this one's answer
            raise
        except TimeoutError:
            self.kill()
            return ProcessFailure("timed_out", f"did not return within {timeout_s:g} s, {limit}")
        except (OSError, ValueError):  # a reset, or more than MAX_ANSWER_BYTES
            line = b""
        if not line:
            return self._ended()
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except msgspec.DecodeError as error:
            self.kill()
            return ProcessFailure("failed", f"wrote into its process's socket what is no answer ({error})")
        return Rewarded(answer.reward) if answer.problem is None else ProcessFailure("failed", answer.problem)

    def _ended(self) -> ProcessFailure:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_WAIT_S)
        code = self._process.poll()
        self.kill()
        if self._is_too_large:
            return too_large(self._config)
        if code is not None and code < 0:
            return ProcessFailure("killed", f"lost its process to signal {-code} ({signal.strsignal(-code)})")
        how = "closed the socket of its process" if code is None else f"ended its process with exit code {code}"
        return ProcessFailure("failed", how)


def without_proxy(host: str) -> dict[str, str]:
    """Return the environment variables for an agent: no proxy applies to the gateway."""
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    exempt = f"{known},{host}" if known else host
    return {**os.environ, "NO_PROXY": exempt, "no_proxy": exempt}


def _plain(value: Any) -> Any:
    """Convert a column's value that JSON cannot represent."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
