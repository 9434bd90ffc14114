"""A killable process that runs user code: calls with a deadline, the memory limit, and how it ended.

    RewardProcess, EnvironmentProcess ─▶ PipeProcess ─▶ SandboxProcess ◀─ AgentProcess, with a socket

Invariant: a call returns soon after its deadline, whatever the code does and whenever its process is killed or
stopped. Each process therefore has its own pipe. With one shared pipe, a process killed while it holds the
pipe's lock stops the others for good (pebble 5.2: after 2 and 4 kills). Answers are msgpack, not pickle,
because the code may run code that a model wrote.
"""

import os
import signal
import socket
import struct
from collections.abc import Iterable
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeVar

import msgspec

from learner.sandbox.descendants import kill_with_descendants, num_children
from learner.sandbox.start import Child
from learner.sandbox.user_files import UserFiles

T = TypeVar("T")

STARTUP_TIMEOUT_S = 120.0
"""Seconds for a process to start and import the user's module, which may import torch."""
STARTUP_REMEDY = "move slow work out of the module's top level"
MAX_CHILDREN = max(128, 2 * (os.cpu_count() or 1))
"""Number of processes that user code may leave behind before its process is replaced. A pool that the code keeps,
with a process for each core, stays below it."""
EXIT_WAIT_S = 1.0
"""Seconds from the end of the pipe to the exit code."""


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a process, and the config keys that set them."""

    section: str
    """Name of the config section: `learner.reward`."""
    processes_key: str
    """Key of the section that limits the number of processes."""
    timeout_s: float
    max_memory_mib: int | None

    @property
    def slow_remedy(self) -> str:
        return f"make it faster or raise {self.section}.timeout_s"


class ProcessFailure(msgspec.Struct, frozen=True):
    """Reason why there is no answer.

    The outcome "failed" means an error of the user's code. "killed" means a signal from outside, which is no
    evidence against the code. "unreachable" means that a service that the code needs is down.
    """

    outcome: Literal["timed_out", "failed", "killed", "unreachable"]
    problem: str
    """What happened, as a predicate: "did not return within 10 s and was killed"."""
    remedy: str = ""

    @property
    def message(self) -> str:
        """The problem and the remedy."""
        return f"{self.problem}; {self.remedy}" if self.remedy else self.problem


class SandboxProcess:
    """A process that runs user code. Any thread may kill it."""

    channel = "pipe"
    """What connects the process to the learner, for error messages."""

    def __init__(self, child: Child, limits: SandboxLimits) -> None:
        self._child, self.limits = child, limits
        self.has_pending_answer = False
        """Whether an answer is pending, possibly because the caller stopped waiting."""
        self._is_killed = self._is_too_large = False
        self.user_files = UserFiles()
        """Files of the user's code. A pool shares them between its processes."""

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_usable(self) -> bool:
        """True if the process can serve another caller."""
        if self._is_killed or self.has_pending_answer or self._child.exitcode is not None:
            return False
        return num_children(self.pid) <= MAX_CHILDREN

    def kill(self) -> None:
        """Kill the process and everything that it has started."""
        self.kill_all([self])

    @staticmethod
    def kill_all(processes: "Iterable[SandboxProcess]") -> None:
        """Kill processes and everything that they have started."""
        alive = [one for one in processes if not one._is_killed]  # the PID of another may be that of a new process
        for process in alive:
            process._is_killed = True
        kill_with_descendants(*(process.pid for process in alive))
        for process in alive:
            process._child.kill()  # it may lead no group yet
        for process in alive:
            process._child.join(EXIT_WAIT_S)

    def close(self) -> None:
        """Kill the process and release what the learner holds of it."""
        self.kill()

    def end_as_too_large(self) -> None:
        """Kill the process because it uses too much memory. The caller that waits for it gets the failure."""
        if not self._is_killed:
            self._is_too_large = True
            kill_with_descendants(self.pid)

    def end_overdue(self, timeout_s: float, remedy: str) -> ProcessFailure:
        """Kill the process because its answer is overdue."""
        self.kill()
        return ProcessFailure("timed_out", f"did not return within {timeout_s:g} s and was killed", remedy)

    def end_invalid(self, error: Exception) -> ProcessFailure:
        """Kill the process because what it wrote is no answer."""
        self.kill()
        problem = f"wrote an invalid answer into the {self.channel} of its process ({error})"
        return ProcessFailure("failed", problem, f"keep the code that it runs from the {self.channel}")

    def end_closed(self) -> ProcessFailure:
        """Kill what is left of the process after it has ended or closed its channel, and return the reason."""
        self._child.join(EXIT_WAIT_S)
        code, limits = self._child.exitcode, self.limits
        self.kill()
        if self._is_too_large:
            problem = f"used more than {limits.max_memory_mib} MiB of memory and was killed"
            remedy = f"make it and what it starts use less or raise {limits.section}.max_memory_mib"
            return ProcessFailure("failed", problem, remedy)
        if code is not None and code < 0:
            problem = f"lost its process to signal {-code} ({signal.strsignal(-code)})"
            remedy = (
                f"check the memory of the machine, and see {limits.section}.max_memory_mib and {limits.processes_key}"
            )
            return ProcessFailure("killed", problem, remedy)
        problem = (
            f"closed the {self.channel} of its process" if code is None else f"ended its process with exit code {code}"
        )
        return ProcessFailure("failed", problem, "correct its code")


class PipeProcess(SandboxProcess):
    """A process at the other end of a pipe, used by one thread at a time except for `kill`."""

    def __init__(self, pipe: Connection, child: Child, limits: SandboxLimits) -> None:
        super().__init__(child, limits)
        self._pipe = pipe
        limit_waits(pipe, limits.timeout_s)

    def ask(
        self, message: Any, decoder: "msgspec.msgpack.Decoder[T]", timeout_s: float, remedy: str
    ) -> T | ProcessFailure:
        """Send a message and return its answer. `remedy`: what to do if it is overdue."""
        failure = self.send(message)
        if failure is not None:
            return failure
        return self.answer(decoder, timeout_s, remedy)

    def answer(self, decoder: "msgspec.msgpack.Decoder[T]", timeout_s: float, remedy: str) -> T | ProcessFailure:
        """Return the answer, or kill the process at the deadline."""
        answer = self.receive(decoder, timeout_s)
        return self.end_overdue(timeout_s, remedy) if answer is None else answer

    def send(self, message: Any) -> ProcessFailure | None:
        """Send a message without waiting for its answer."""
        try:
            self._pipe.send(message)
        except BlockingIOError:  # the process is stopped, and the pipe is full
            return self.end_overdue(self.limits.timeout_s, self.limits.slow_remedy)
        except OSError:
            return self.end_closed()
        return None

    def receive(
        self, decoder: "msgspec.msgpack.Decoder[T]", timeout_s: float | None, *wakers: Connection
    ) -> T | ProcessFailure | None:
        """Return the next answer, or None on a timeout or when a waker is readable.

        The process has ended after a ProcessFailure.
        """
        sentinels = [] if self._child.sentinel is None else [self._child.sentinel]
        ready = connection.wait([self._pipe, *sentinels, *wakers], timeout_s)
        try:
            if self._pipe.poll():
                return decoder.decode(self._pipe.recv_bytes())
        except BlockingIOError:  # the process was stopped while it wrote its answer
            return self.end_overdue(self.limits.timeout_s, self.limits.slow_remedy)
        except (EOFError, OSError):
            return self.end_closed()
        except msgspec.DecodeError as error:
            return self.end_invalid(error)
        has_ended = self._child.exitcode is not None or self._child.sentinel in ready
        return self.end_closed() if has_ended else None


def limit_waits(pipe: Connection, timeout_s: float) -> None:
    """Let reads and writes of a message fail with BlockingIOError after `timeout_s`.

    A stopped process neither reads nor writes, so its peer would wait forever.
    """
    with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as view:
        seconds, fraction = divmod(timeout_s, 1)
        timeout = struct.pack("ll", int(seconds), int(fraction * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            view.setsockopt(socket.SOL_SOCKET, option, timeout)
