"""One process that runs reward functions.

call ──▶ pipe ──▶ serve (in the process) ──▶ call_function ──▶ pipe ──▶ an answer, or a ProcessFailure
                      └▶ one event loop, in a thread ──▶ await_function
"""

import asyncio
import os
import threading
from collections.abc import Awaitable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec

from learner.config import RewardConfig
from learner.rewards.call import (
    RewardAnswer,
    RewardCall,
    UnreachableService,
    await_function,
    call_function,
    is_unreachable,
)
from learner.rewards.function import BUILT_IN, LoadedFunctions, load_all
from learner.sandbox.descendants import end_if_forked
from learner.sandbox.process import (
    STARTUP_REMEDY,
    STARTUP_TIMEOUT_S,
    PipeProcess,
    ProcessFailure,
    SandboxLimits,
)
from learner.sandbox.start import spawn
from learner.servers.loop_thread import LoopThread
from protocol.errors import RewardError


class Reply(msgspec.Struct, frozen=True):
    """Result of a call: an answer, an error, or None if canceled at its deadline."""

    number: int
    answer: RewardAnswer | UnreachableService | str | None


REPLY = msgspec.msgpack.Decoder(Reply)
UNREACHABLE_REMEDY = "start the service that it calls, or raise learner.reward.unreachable_s"
LOADED = msgspec.msgpack.Decoder(LoadedFunctions)


class RewardProcess(PipeProcess):
    """A process that runs reward functions. It starts without waiting for the imports."""

    def __init__(self, config: RewardConfig) -> None:
        super().__init__(*spawn("reward process", serve, config), limits_of(config))
        self._config = config
        self._num_calls = 0
        self.loaded: LoadedFunctions | None = None
        """Properties of the functions, once they are loaded."""

    @property
    def is_usable(self) -> bool:
        """True if the process is alive and below calls_per_worker."""
        limit = self._config.calls_per_worker
        return super().is_usable and (limit is None or self._num_calls < limit)

    def load(self) -> ProcessFailure | None:
        """Wait for the imports. Return a ProcessFailure if a function cannot be imported."""
        if self.loaded is not None:
            return None
        loaded = self.answer(LOADED, STARTUP_TIMEOUT_S, STARTUP_REMEDY)
        if isinstance(loaded, ProcessFailure):
            if loaded.outcome == "killed":
                return loaded
            functions = ", ".join(self._config.functions)
            problem = f"a process that imported learner.reward.functions ({functions}) {loaded.problem}"
            return ProcessFailure("failed", f"cannot be loaded: {problem}", loaded.remedy)
        if loaded.problem:
            self.kill()
            outcome: Literal["unreachable", "failed"] = "unreachable" if loaded.is_unreachable else "failed"
            remedy = UNREACHABLE_REMEDY if loaded.is_unreachable else ""
            return ProcessFailure(outcome, f"cannot be loaded: {loaded.problem}", remedy)
        self.user_files.compare(loaded.file_digests)
        self.loaded = loaded
        return None

    def call(self, call: RewardCall) -> RewardAnswer | ProcessFailure:
        """Run a call that has the process to itself, and return its answer.

        The process has ended after a ProcessFailure, unless the function itself reported the error.
        """
        failure = self.load() or self.start_call(0, call)
        if failure is not None:
            return failure
        reply = self.answer(REPLY, call.timeout_s, self.limits.slow_remedy)
        return reply if isinstance(reply, ProcessFailure) else answer_of(reply, call, self._config)

    def start_call(self, number: int, call: RewardCall) -> ProcessFailure | None:
        """Send a call without waiting for its reply."""
        self._num_calls += 1
        return self.send((number, call))

    def next_reply(self, timeout_s: float | None, *wakers: Connection) -> Reply | ProcessFailure | None:
        """Return the next reply, or None on a timeout or when a waker is readable."""
        return self.receive(REPLY, timeout_s, *wakers)


def limits_of(config: RewardConfig) -> SandboxLimits:
    """Return the limits of a process of reward functions."""
    return SandboxLimits(
        section="learner.reward",
        processes_key="num_workers",
        timeout_s=config.timeout_s,
        max_memory_mib=config.max_memory_mib,
    )


def answer_of(reply: Reply, call: RewardCall, config: RewardConfig) -> RewardAnswer | ProcessFailure:
    """Return the rewards of a reply, or the function's error as a ProcessFailure."""
    match reply.answer:
        case RewardAnswer() as answer:
            return answer
        case UnreachableService(problem):
            return ProcessFailure("unreachable", problem, UNREACHABLE_REMEDY)
        case None:
            problem = f"did not return within {config.timeout_s:g} s and was canceled"
            return ProcessFailure("timed_out", problem, "make it faster or raise learner.reward.timeout_s")
        case problem:
            return ProcessFailure("failed", problem, "" if call.function in BUILT_IN else "correct the function")


# --- in the process -----------------------------------------------------------------------------------------
def serve(pipe: Connection, config: RewardConfig) -> None:
    """Import the functions, then answer calls until the learner is gone."""
    owner = os.getpid()
    try:
        loaded = load_all(config)
    except RewardError as error:
        loaded = LoadedFunctions(problem=str(error), is_unreachable=is_unreachable(error))
    end_if_forked(owner)
    pipe.send_bytes(msgspec.msgpack.encode(loaded))
    # As in TRL, one event loop for the life of the process. A client made in one call works in the next.
    loop, sending, reserved = LoopThread("reward loop"), threading.Lock(), config.own_metrics

    def reply(number: int, answer: RewardAnswer | UnreachableService | str | None) -> None:
        end_if_forked(owner)
        with sending:
            pipe.send_bytes(msgspec.msgpack.encode(Reply(number, answer)))

    async def answer_in_time(number: int, call: RewardCall) -> None:
        answer: RewardAnswer | UnreachableService | str | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(call.timeout_s):
                answer = await await_function(call, reserved)
        reply(number, answer)

    def wait_for(awaitable: Awaitable[Any]) -> Any:
        return loop.submit(_result_of(awaitable)).result()

    while True:
        number, call = pipe.recv()
        if call.function in loaded.asynchronous:
            loop.spawn(answer_in_time(number, call))
        else:
            reply(number, call_function(call, reserved, wait_for))


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
