"""One process in which reward functions run: started, called with a deadline, killed. Between workers.py and the functions.

    call ──▶ pipe ──▶ serve (in the process) ──▶ call_function ──▶ pipe ──▶ rewards, or a Trouble

Invariant: whatever the function does and whoever kills or stops the process at whatever moment, `call` comes back soon after
its deadline. So each process has a pipe of its own: in a pool that shares one, a process that is killed while it holds the
lock of the pipe stops the others for good (pebble 5.2: after 2 and 4 kills). What comes back is msgpack and no pickle,
because a reward function may run code that a model wrote.
"""

import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import msgspec

from learner.config import RewardConfig
from learner.rewards.function import call_function, load_problem
from protocol.errors import RewardError

# How long a process may take to start and import the functions' modules, torch among them if a user wants it.
STARTUP_TIMEOUT_S = 120.0
MEMORY_WATCH_S = 0.02
EXIT_WAIT_S = 1.0
"""From the end of the pipe to the exit code."""

ANSWER: msgspec.msgpack.Decoder[list[float | None] | str] = msgspec.msgpack.Decoder(list[float | None] | str)
"""Rewards, or what was wrong with them; after the start what is wrong with the functions, or nothing."""
# Spawned, not forked: the learner's threads, sockets and tensors must not come along.
CONTEXT = multiprocessing.get_context("spawn")


class Call(msgspec.Struct, frozen=True):
    """What a reward function is called with, see call_function."""

    function: str
    prompt: Any
    columns: dict[str, Any]
    completions: list[str]
    completion_ids: list[list[int]]


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Why there are no rewards. killed: by a signal, which says nothing about the function."""

    outcome: Literal["timed_out", "failed", "killed"]
    problem: str
    remedy: str


class RewardProcess:
    """From its start, which does not wait for the imports, to its end; not thread-safe but for `kill`."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=serve, args=(theirs, config.functions), name="reward process")
        self._process.start()
        theirs.close()
        self._is_loaded = False
        self.num_calls = 0
        _limit_waits(self._pipe, config.timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def kill(self) -> None:
        """End it now, and what it has started."""
        with suppress(ProcessLookupError):  # it leads no group of its own yet, or is gone
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def load(self) -> Trouble | None:
        """Wait until the functions are imported. Raises RewardError if one cannot be; a Trouble says that it was killed."""
        if self._is_loaded:
            return None
        answer = self._answer(STARTUP_TIMEOUT_S)
        if isinstance(answer, Trouble) and answer.outcome == "killed":
            return answer
        functions = ", ".join(self._config.functions)
        if isinstance(answer, Trouble) and answer.outcome == "timed_out":
            raise RewardError(
                f"importing learner.reward.functions ({functions}) took longer than {STARTUP_TIMEOUT_S:g} s; "
                "move slow work out of the module's top level"
            )
        if isinstance(answer, Trouble):
            raise RewardError(
                f"a process that imported learner.reward.functions ({functions}) {answer.problem}; {answer.remedy}"
            )
        if answer:
            raise RewardError(str(answer))
        self._is_loaded = True
        return None

    def call(self, call: Call) -> list[float | None] | Trouble:
        """Return the rewards of one group. After a Trouble that is not the function's own answer the process is over."""
        trouble = self.load()
        if trouble is not None:
            return trouble
        self.num_calls += 1
        try:
            self._pipe.send(msgspec.structs.astuple(call))
        except BlockingIOError:  # the process is stopped, and the pipe full
            return self._killed_late()
        except OSError:
            return self._ended()
        answer = self._answer(self._config.timeout_s)
        if isinstance(answer, str):
            return Trouble(outcome="failed", problem=answer, remedy="correct the function")
        return answer

    def _answer(self, timeout_s: float) -> list[float | None] | str | Trouble:
        deadline = time.monotonic() + timeout_s
        watch_s = MEMORY_WATCH_S if self._config.max_memory_mib is not None else timeout_s
        while True:
            connection.wait([self._pipe, self._process.sentinel], min(watch_s, max(0.0, deadline - time.monotonic())))
            try:
                if self._pipe.poll():
                    return ANSWER.decode(self._pipe.recv_bytes())
            except BlockingIOError:  # it was stopped in the midst of its answer
                return self._killed_late()
            except (EOFError, OSError):
                return self._ended()
            except msgspec.DecodeError as error:
                return self._nonsense(str(error))
            if not self._process.is_alive():
                return self._ended()
            if self._uses_too_much():
                self.kill()
                return Trouble(
                    outcome="failed",
                    problem=f"used more than {self._config.max_memory_mib} MiB of memory and was killed",
                    remedy="make it use less or raise learner.reward.max_memory_mib",
                )
            if time.monotonic() > deadline:
                return self._killed_late()

    def _uses_too_much(self) -> bool:
        """What is resident counts, and the process is watched from outside. A limit of the system's (RLIMIT_AS) hangs
        torch's import, and both it and RLIMIT_DATA give a MemoryError that a function's own `except` turns into a 0."""
        if self._config.max_memory_mib is None:
            return False
        try:
            num_pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return False  # it has just ended
        return num_pages * os.sysconf("SC_PAGE_SIZE") > self._config.max_memory_mib << 20

    def _killed_late(self) -> Trouble:
        self.kill()
        return Trouble(
            outcome="timed_out",
            problem=f"did not return within {self._config.timeout_s:g} s and was killed",
            remedy="make it faster or raise learner.reward.timeout_s",
        )

    def _ended(self) -> Trouble:
        self._process.join(EXIT_WAIT_S)
        code = self._process.exitcode
        self.kill()
        if code is not None and code < 0:
            return Trouble(
                outcome="killed",
                problem=f"lost its process to signal {-code} ({signal.strsignal(-code)})",
                remedy="is the machine out of memory? See learner.reward.max_memory_mib and num_workers",
            )
        how = "closed the pipe of its process" if code is None else f"ended its process with exit code {code}"
        return Trouble(outcome="failed", problem=how, remedy="correct the function")

    def _nonsense(self, came: str) -> Trouble:
        self.kill()
        return Trouble(
            outcome="failed",
            problem=f"wrote into its process's pipe what is no answer ({came})",
            remedy="keep the code that it runs from the pipe",
        )


def _limit_waits(pipe: connection.Connection, timeout_s: float) -> None:
    """A stopped process neither reads nor writes on: let what waits for it within a message fail, with BlockingIOError."""
    with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as view:
        seconds, fraction = divmod(timeout_s, 1)
        timeout = struct.pack("ll", int(seconds), int(fraction * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            view.setsockopt(socket.SOL_SOCKET, option, timeout)


# --- in the process --------------------------------------------------------------------------------------------------
def serve(pipe: connection.Connection, functions: Sequence[str]) -> None:
    """Import the functions, then answer calls until the learner is gone; ends with it even in the midst of a call."""
    os.setsid()  # the leader of what a function starts, which `kill` then ends too; Ctrl-C is the learner's alone
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    pipe.send_bytes(msgspec.msgpack.encode(load_problem(functions) or ""))
    with suppress(EOFError):
        while True:
            pipe.send_bytes(msgspec.msgpack.encode(call_function(*pipe.recv())))


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os.killpg(0, signal.SIGKILL)
