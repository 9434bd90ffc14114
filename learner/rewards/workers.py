"""Rewards: the completions of a group are scored by reward functions in processes that can be killed.

    group ──▶ submit ──▶ queue ──▶ thread with a process of its own ──▶ one call per function ──▶ GroupRewards ──▶ advantages

Invariant: every submitted group gets an answer within the functions' deadlines, and wrong (a reward of 0), timed out and
failed stay three different things: a function that timed out or failed gives None for every completion. A process that was
killed from outside is none of them: the call is made again.
"""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal

import msgspec

from learner.config import RewardConfig
from learner.rewards.function import shorten
from learner.rewards.process import Call, RewardProcess, Trouble
from protocol.errors import RewardError

if TYPE_CHECKING:
    from learner.prompts.prompts import Prompt

import logging

log = logging.getLogger(__name__)

MAX_KILLED_CALLS = 3
"""A call whose process was killed so often has failed."""
STOP_TIMEOUT_S = 5.0


class FunctionRewards(msgspec.Struct, frozen=True, kw_only=True):
    """What one function said about a group."""

    name: str
    rewards: list[float | None]
    outcome: Literal["ok", "timed_out", "failed"] = "ok"
    message: str | None = None
    """Unless the outcome is ok: what went wrong, with the function and the prompt."""


class GroupRewards(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of a group.

    Example: GroupRewards(rewards=[1.0, None], functions=[FunctionRewards(name="exact_match", rewards=[1.0, None])]).
    """

    rewards: list[float | None]
    """Weighted sum over the functions that scored a completion; None: none did."""
    functions: list[FunctionRewards]

    @property
    def mean(self) -> float | None:
        """Over the scorable completions; None: there is none."""
        scorable = [reward for reward in self.rewards if reward is not None]
        return sum(scorable) / len(scorable) if scorable else None

    @property
    def by_function(self) -> dict[str, list[float | None]]:
        return {function.name: function.rewards for function in self.functions}

    @property
    def is_unscorable(self) -> bool:
        """Whether no completion has a reward because a function timed out or failed, not because the functions said so."""
        return self.mean is None and any(function.outcome != "ok" for function in self.functions)


class Task(msgspec.Struct, frozen=True, eq=False):
    """A group to be scored, and who waits for it."""

    future: Future[GroupRewards]
    prompt: "Prompt"
    completions: list[str]
    completion_ids: list[list[int]]


class RewardWorkers:
    """Threads with a process each, in which reward functions run; use as a context manager, or close."""

    def __init__(self, config: RewardConfig) -> None:
        """Start the processes. Raises RewardError if a function cannot be loaded in them."""
        self._config = config
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._pending: set[Future[GroupRewards]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._processes = [RewardProcess(config) for _ in range(config.num_workers)]
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"rewards {worker}", daemon=True)
            for worker in range(config.num_workers)
        ]
        try:
            for process in self._processes:
                process.load()  # one that was killed is replaced at its first call
        except RewardError:
            self.close()
            raise
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "RewardWorkers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(
        self, prompt: "Prompt", completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> "Future[GroupRewards]":
        """Score the completions of one prompt. The future cannot be cancelled; close() ends it with a RewardError."""
        future: Future[GroupRewards] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._closed:
                raise RewardError("the reward workers are closed; no group can be scored any more")
            self._pending.add(future)
            self._tasks.put(Task(future, prompt, list(completions), [list(ids) for ids in completion_ids]))
        return future

    def close(self) -> None:
        """Kill the processes, whatever they do; groups that wait for a score end with a RewardError."""
        with self._lock:
            self._closed = True
            pending, self._pending = self._pending, set()
            for process in self._processes:
                process.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(STOP_TIMEOUT_S)
        for future in pending:
            future.set_exception(RewardError("the reward workers were closed before the group was scored"))

    # --- a worker's thread ---------------------------------------------------------------------------------------

    def _work(self, worker: int) -> None:
        while (task := self._tasks.get()) is not None:
            scored: GroupRewards | Exception
            try:
                scored = self._score(worker, task)
            except Exception as error:  # raised where the group is waited for
                scored = error
            with self._lock:
                if task.future not in self._pending:  # closed
                    continue
                self._pending.discard(task.future)
            if isinstance(scored, Exception):
                task.future.set_exception(scored)
            else:
                task.future.set_result(scored)

    def _score(self, worker: int, task: Task) -> GroupRewards:
        config = self._config
        results = [
            self._call(worker, name, function, task)
            for name, function in zip(config.names, config.functions, strict=True)
        ]
        rewards = [
            _weighted_sum(config.function_weights, [result.rewards[i] for result in results])
            for i in range(len(task.completions))
        ]
        return GroupRewards(rewards=rewards, functions=results)

    def _call(self, worker: int, name: str, function: str, task: Task) -> FunctionRewards:
        call = Call(function, task.prompt.prompt, task.prompt.columns, task.completions, task.completion_ids)
        answer = self._answer(worker, name, call)
        if not isinstance(answer, Trouble):
            return FunctionRewards(name=name, rewards=answer)
        message = (
            f"reward function {name} {answer.problem}, for {len(task.completions)} completions of prompt "
            f"{shorten(task.prompt.prompt)}, the first of them {shorten(task.completions[0])}; {answer.remedy}"
        )
        return FunctionRewards(
            name=name,
            rewards=[None] * len(task.completions),
            outcome="timed_out" if answer.outcome == "timed_out" else "failed",
            message=message,
        )

    def _answer(self, worker: int, name: str, call: Call) -> list[float | None] | Trouble:
        num_killed = 0
        while True:
            answer = self._process(worker).call(call)
            if not isinstance(answer, Trouble) or answer.outcome != "killed":
                return answer
            num_killed += 1
            if num_killed == MAX_KILLED_CALLS or self._closed:
                return answer
            log.warning("reward function %s %s; it is called again", name, answer.problem)

    def _process(self, worker: int) -> RewardProcess:
        """The worker's process, or a new one where that has ended or is worn out. Raises RewardError when closed."""
        process, limit = self._processes[worker], self._config.calls_per_worker
        if process.is_alive and (limit is None or process.num_calls < limit):
            return process
        process.kill()
        with self._lock:
            if self._closed:
                raise RewardError("the reward workers are closed")
            self._processes[worker] = RewardProcess(self._config)
        return self._processes[worker]


def _weighted_sum(weights: Sequence[float], rewards: Sequence[float | None]) -> float | None:
    """None where no function with a weight gave a reward, so that a function that only watches never makes it 0."""
    terms = [w * r for w, r in zip(weights, rewards, strict=True) if w != 0 and r is not None]
    return sum(terms) if terms else None
