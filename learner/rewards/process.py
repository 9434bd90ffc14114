"""One process that runs reward functions: start, call, kill.

    call ──▶ pipe ──▶ serve (in the process) ──▶ call_function ──▶ pipe ──▶ an answer, or a WorkerFailure
                          └▶ one event loop, in a thread ──▶ await_function

Invariant: a caller returns soon after the deadline, whatever the function does and whenever its process is
killed or stopped. Each process therefore has its own pipe. With one shared pipe, a process killed while it
holds the pipe's lock stops the others for good (pebble 5.2: after 2 and 4 kills). Results are msgpack, not
pickle, because a reward function may run code that a model wrote.
"""

import asyncio
import multiprocessing
import signal
import threading
import time
from collections.abc import Awaitable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import connection
from typing import Any, Literal, TypeVar

import msgspec

from learner.config import RewardConfig
from learner.rewards.call import Answer, Call, await_function, call_function
from learner.rewards.function import Loaded, load_all
from learner.rewards.reach import Unreached
from learner.sandbox.child import end_with_the_learner, limit_waits, start_child
from learner.sandbox.descendants import all_processes, end_with_descendants, kill_with_descendants
from learner.sandbox.memory_watch import WATCH_S, resident_bytes
from protocol.errors import RewardError

T = TypeVar("T")

# Time for a process to start and import the functions' modules, which may include torch.
STARTUP_TIMEOUT_S = 120.0
EXIT_WAIT_S = 1.0
"""Seconds from the end of the pipe to the exit code."""


class Reply(msgspec.Struct, frozen=True):
    """Result of a call: an answer, an error, or None if canceled at its deadline."""

    number: int
    answer: Answer | Unreached | str | None


REPLY = msgspec.msgpack.Decoder(Reply)
LOADED = msgspec.msgpack.Decoder(Loaded)
# Spawned, not forked, so that no process inherits the learner's threads, sockets and tensors.
CONTEXT = multiprocessing.get_context("spawn")


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why there are no rewards.

    The outcome "killed" means a signal, which is no evidence against the function.
    """

    outcome: Literal["timed_out", "failed", "killed", "unreachable"]
    problem: str
    remedy: str


class RewardProcess:
    """A process that runs reward functions. Only `kill` is thread-safe.

    It starts without waiting for the imports.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self.pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=serve, args=(theirs, config), name="reward process")
        start_child(self._process)
        theirs.close()
        self._loaded: Loaded | None = None
        self.num_calls = 0
        limit_waits(self.pipe, config.timeout_s)

    @property
    def is_usable(self) -> bool:
        """True if the process is alive and below calls_per_worker."""
        limit = self._config.calls_per_worker
        return self._process.is_alive() and (limit is None or self.num_calls < limit)

    @property
    def asynchronous(self) -> frozenset[str]:
        """Asynchronous functions, once the functions are loaded."""
        return self._loaded.asynchronous if self._loaded else frozenset()

    @property
    def with_environments(self) -> frozenset[str]:
        """Functions that ask for the environments' attributes, once they are loaded."""
        return self._loaded.with_environments if self._loaded else frozenset()

    def kill(self) -> None:
        """Kill the process and everything that it has started."""
        kill_with_descendants(self._process.pid or 0)
        self._process.kill()
        self._process.join()

    def load(self) -> WorkerFailure | None:
        """Wait for the imports. Return a WorkerFailure if the process was killed.

        Raises:
            RewardError: If a function cannot be imported.
        """
        if self._loaded is not None:
            return None
        loaded = self._wait_for(LOADED, time.monotonic() + STARTUP_TIMEOUT_S)
        if isinstance(loaded, WorkerFailure) and loaded.outcome == "killed":
            return loaded
        functions = ", ".join(self._config.functions)
        if loaded is None:
            self.kill()
            raise RewardError(
                f"importing learner.reward.functions ({functions}) took longer than {STARTUP_TIMEOUT_S:g} s; "
                "move slow work out of the module's top level"
            )
        if isinstance(loaded, WorkerFailure):
            raise RewardError(
                f"a process that imported learner.reward.functions ({functions}) {loaded.problem}; {loaded.remedy}"
            )
        if loaded.problem:
            raise RewardError(loaded.problem)
        self._loaded = loaded
        return None

    def call(self, call: Call) -> Answer | WorkerFailure:
        """Run a call that has the process to itself, and return its answer.

        The process has ended after a WorkerFailure, unless the function itself reported the error.
        """
        trouble = self.load() or self.send(0, call)
        if trouble is not None:
            return trouble
        reply = self._wait_for(REPLY, time.monotonic() + call.timeout_s)
        if isinstance(reply, WorkerFailure):
            return reply
        return answer_of(reply, self._config) if reply is not None else self.killed_late()

    def send(self, number: int, call: Call) -> WorkerFailure | None:
        """Send a call without waiting for its result."""
        self.num_calls += 1
        try:
            self.pipe.send((number, call))
        except BlockingIOError:  # the process is stopped, and the pipe is full
            return self.killed_late()
        except OSError:
            return self._ended()
        return None

    def receive(self, timeout_s: float | None, *wakers: connection.Connection) -> Reply | WorkerFailure | None:
        """Return the next reply, or None on a timeout or when a waker is readable.

        The process has ended after a WorkerFailure.
        """
        return self._receive(REPLY, timeout_s, *wakers)

    def _wait_for(self, decoder: "msgspec.msgpack.Decoder[T]", deadline: float) -> T | WorkerFailure | None:
        while True:
            received = self._receive(decoder, max(0.0, deadline - time.monotonic()))
            if received is not None or time.monotonic() > deadline:
                return received

    def _receive(
        self, decoder: "msgspec.msgpack.Decoder[T]", timeout_s: float | None, *wakers: connection.Connection
    ) -> T | WorkerFailure | None:
        if self._config.max_memory_mib is not None and timeout_s is not None:
            timeout_s = min(WATCH_S, timeout_s)
        connection.wait([self.pipe, self._process.sentinel, *wakers], timeout_s)
        try:
            if self.pipe.poll():
                return decoder.decode(self.pipe.recv_bytes())
        except BlockingIOError:  # the process was stopped while it wrote its answer
            return self.killed_late()
        except (EOFError, OSError):
            return self._ended()
        except msgspec.DecodeError as error:
            return self._nonsense(str(error))
        if not self._process.is_alive():
            return self._ended()
        if self._uses_too_much():
            self.kill()
            return WorkerFailure(
                outcome="failed",
                problem=f"used more than {self._config.max_memory_mib} MiB of memory and was killed",
                remedy="make it use less or raise learner.reward.max_memory_mib",
            )
        return None

    def _uses_too_much(self) -> bool:
        """Return whether the resident memory, watched from outside, exceeds the limit.

        RLIMIT_AS hangs torch's import. Both RLIMIT_AS and RLIMIT_DATA cause a MemoryError, which a function's
        own `except` turns into a 0.
        """
        limit = self._config.max_memory_mib
        return limit is not None and resident_bytes(self._process.pid or 0, all_processes()) > limit << 20

    def killed_late(self) -> WorkerFailure:
        """Kill the process because a call is overdue."""
        self.kill()
        return too_late(self._config, "was killed")

    def _ended(self) -> WorkerFailure:
        self._process.join(EXIT_WAIT_S)
        code = self._process.exitcode
        self.kill()
        if code is not None and code < 0:
            return WorkerFailure(
                outcome="killed",
                problem=f"lost its process to signal {-code} ({signal.strsignal(-code)})",
                remedy="is the machine out of memory? See learner.reward.max_memory_mib and num_workers",
            )
        how = "closed the pipe of its process" if code is None else f"ended its process with exit code {code}"
        return WorkerFailure(outcome="failed", problem=how, remedy="correct the function")

    def _nonsense(self, came: str) -> WorkerFailure:
        self.kill()
        return WorkerFailure(
            outcome="failed",
            problem=f"wrote into its process's pipe what is no answer ({came})",
            remedy="keep the code that it runs from the pipe",
        )


def answer_of(reply: Reply, config: RewardConfig) -> Answer | WorkerFailure:
    """Return the rewards of a reply, or the function's error as a WorkerFailure."""
    if isinstance(reply.answer, Answer):
        return reply.answer
    if reply.answer is None:
        return too_late(config, "was cancelled")
    if isinstance(reply.answer, Unreached):
        remedy = "start what it asks, or raise learner.reward.unreachable_s"
        return WorkerFailure(outcome="unreachable", problem=reply.answer.problem, remedy=remedy)
    return WorkerFailure(outcome="failed", problem=reply.answer, remedy="correct the function")


def too_late(config: RewardConfig, end: str) -> WorkerFailure:
    return WorkerFailure(
        outcome="timed_out",
        problem=f"did not return within {config.timeout_s:g} s and {end}",
        remedy="make it faster or raise learner.reward.timeout_s",
    )


# --- in the process -----------------------------------------------------------------------------------------
def serve(pipe: connection.Connection, config: RewardConfig) -> None:
    """Import the functions, then answer calls until the learner is gone.

    The process ends with the learner, even during a call.
    """
    end_with_the_learner()
    loaded = load_all(config)
    pipe.send_bytes(msgspec.msgpack.encode(loaded))
    loop, sending, reserved = LoopThread(), threading.Lock(), config.own_metrics

    def reply(number: int, answer: Answer | Unreached | str | None) -> None:
        with sending:
            pipe.send_bytes(msgspec.msgpack.encode(Reply(number, answer)))

    async def answer_in_time(number: int, call: Call) -> None:
        answer: Answer | Unreached | str | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(call.timeout_s):
                answer = await await_function(call, reserved)
        reply(number, answer)

    with suppress(EOFError, ConnectionError):
        while True:
            number, call = pipe.recv()
            if call.function in loaded.asynchronous:
                loop.spawn(answer_in_time(number, call))
            else:
                reply(number, call_function(call, reserved, loop.wait))
    end_with_descendants()  # the learner is gone


class LoopThread:
    """One event loop in a thread for the life of the process, as in TRL.

    A client made in one call therefore works in the next.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="reward loop", daemon=True).start()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        async def result() -> Any:
            return await awaitable

        return asyncio.run_coroutine_threadsafe(result(), self._loop).result()
