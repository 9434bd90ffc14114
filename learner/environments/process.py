"""The learner's end of an environment's process: start, ask, kill.

`host.py` runs in the process.
Invariant: a call returns soon after its deadline, even if its process misbehaves or is killed. After a
ProcessFailure the process has ended. Each process has its own pipe, so that none holds a lock that another
waits for.
"""

import signal
from typing import Any, Literal

import msgspec

from learner.config import EnvironmentConfig
from learner.environments.host import ANSWER, Answer, ClassError, Command, Describe, Described
from learner.environments.start import start
from learner.sandbox.child import limit_waits
from learner.sandbox.descendants import kill_with_descendants
from protocol.errors import ConfigError

STARTUP_TIMEOUT_S = 120.0
EXIT_WAIT_S = 1.0
"""Seconds from the end of the pipe to the exit code."""


class ProcessFailure(msgspec.Struct, frozen=True):
    """Reason why there is no answer.

    The outcome "failed" means an error of the class. "killed" means a kill from outside, which is no evidence
    against the class.
    """

    outcome: Literal["timed_out", "failed", "killed"]
    problem: str


class EnvironmentProcess:
    """A process for one environment, used by one thread at a time except for `kill`.

    It starts without waiting for the class to load.
    """

    def __init__(self, config: EnvironmentConfig, *, takes_text: bool) -> None:
        """Start the process. Raises ConfigError if its interpreter cannot be started."""
        self._config = config
        self._pipe, self._process = start(config, takes_text=takes_text)
        self._is_loaded = self._is_too_large = False
        limit_waits(self._pipe, config.timeout_s)

    @property
    def is_usable(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def load(self) -> ProcessFailure | None:
        """Wait until the class is loaded, and return the ProcessFailure if that fails."""
        if not self._is_loaded:
            answer = self._answer(STARTUP_TIMEOUT_S)
            if isinstance(answer, ProcessFailure):
                return answer
            self._is_loaded = True
        return None

    def ask(self, order: Command) -> Answer | ProcessFailure:
        """Send a command and return its answer; an error of the class is a ProcessFailure."""
        trouble = self.load()
        if trouble is not None:
            return trouble
        try:
            self._pipe.send(order)
        except BlockingIOError:  # the process is stopped, and the pipe is full
            return self._too_late()
        except OSError:
            return self._ended()
        return self._answer(STARTUP_TIMEOUT_S if isinstance(order, Describe) else self._config.timeout_s)

    def kill(self) -> None:
        """Kill the process and everything that it has started."""
        self._kill_all()
        self._process.kill()
        self._process.join(EXIT_WAIT_S)

    def end_as_too_large(self) -> None:
        """Kill the process because it uses too much memory. Any thread may call this."""
        self._is_too_large = True
        self._kill_all()

    def _kill_all(self) -> None:
        kill_with_descendants(self.pid)

    def _answer(self, timeout_s: float) -> Answer | ProcessFailure:
        try:
            if not self._pipe.poll(timeout_s):
                return self._too_late()
            answer = ANSWER.decode(self._pipe.recv_bytes())
        except BlockingIOError:  # the process was stopped while it wrote its answer
            return self._too_late()
        except (EOFError, OSError):
            return self._ended()
        except msgspec.DecodeError as error:
            self.kill()
            return ProcessFailure("failed", f"wrote into its process's pipe what is no answer ({error})")
        if isinstance(answer, ClassError):
            self.kill()
            return ProcessFailure("failed", answer.problem)
        return answer

    def _too_late(self) -> ProcessFailure:
        self.kill()
        limit = f"{self._config.timeout_s:g} s (learner.environment.timeout_s)"
        if not self._is_loaded:
            limit = f"{STARTUP_TIMEOUT_S:g} s, which importing it took; move slow work out of the module's top level"
        return ProcessFailure("timed_out", f"did not return within {limit}")

    def _ended(self) -> ProcessFailure:
        self._process.join(EXIT_WAIT_S)
        code = self._process.exitcode
        self.kill()
        if self._is_too_large:
            return too_large(self._config)
        if code is not None and code < 0:
            return ProcessFailure("killed", f"lost its process to signal {-code} ({signal.strsignal(-code)})")
        how = "closed the pipe of its process" if code is None else f"ended its process with exit code {code}"
        return ProcessFailure("failed", how)


def too_large(config: EnvironmentConfig) -> ProcessFailure:
    """Return the ProcessFailure of a process that the memory watch has killed."""
    limit = f"{config.max_memory_mib} MiB of memory, with what it had started, and was killed (learner.environment.max_memory_mib)"
    return ProcessFailure("failed", f"held more than {limit}")


def tools_of(config: EnvironmentConfig) -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools. Raises ConfigError if that fails."""
    process = EnvironmentProcess(config, takes_text=False)
    try:
        answer = process.ask(Describe())
    finally:
        process.kill()  # frees what describing has imported
    if isinstance(answer, ProcessFailure):
        raise ConfigError(f"{config.named}: {answer.problem}")
    assert isinstance(answer, Described)
    return answer.schemas
