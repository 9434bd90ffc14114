"""Score the completions of a group with reward functions in killable processes.

    group ──▶ submit ──▶ a job per function ──▶ call_queues.py ──▶ processes ──▶ GroupRewards ──▶ advantages

Invariant: every submitted group gets a result within the functions' deadlines, except while a function whose
service is unreachable is retried (`call.py`). Wrong (a reward of 0), timed out and failed stay
distinct. A function that timed out or failed gives None for every completion. The call of a process that was
killed from outside is repeated.
"""

import statistics
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from learner.config import RewardConfig
from learner.rewards.call import CompletionContent, Extra, RetrySchedule, RewardAnswer, RewardCall, TrainerState
from learner.rewards.call_queues import ConcurrentCalls, DelayedJobs, Job, SerialCalls
from learner.rewards.function import BUILT_IN
from learner.rewards.process import RewardProcess, limits_of
from learner.sandbox.pool import ProcessPool
from learner.sandbox.process import ProcessFailure
from learner.sandbox.user_code import shorten
from protocol.errors import RewardError, SlipstreamError

if TYPE_CHECKING:
    from learner.prompts.prompts import Prompt

T = TypeVar("T")


class FunctionRewards(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of one function for a group."""

    name: str
    rewards: list[float | None]
    outcome: Literal["ok", "timed_out", "failed", "unreachable"] = "ok"
    message: str | None = None
    """Error with the function and the prompt, unless the outcome is ok."""
    metrics: dict[str, list[float]] = {}
    """Values that the function logged with `log_metric`."""
    extra: dict[str, list[Extra]] = {}
    """Values that the function logged with `log_extra`, per completion. Not in the ledger."""


class GroupRewards(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of a group.

    Example: rewards=[1.0, None], functions=[FunctionRewards(name="exact_match", rewards=[1.0, None])].
    """

    rewards: list[float | None]
    """Weighted sum over the functions. None: the completion cannot be scored (learner.reward.on_none)."""
    functions: list[FunctionRewards]

    @property
    def mean(self) -> float | None:
        """Mean over the scorable completions, or None if there are none."""
        scorable = [reward for reward in self.rewards if reward is not None]
        return sum(scorable) / len(scorable) if scorable else None

    @property
    def by_function(self) -> dict[str, list[float | None]]:
        return {function.name: function.rewards for function in self.functions}

    @property
    def logged_metrics(self) -> dict[str, list[float]]:
        """Metrics that the functions logged, by name."""
        logged: dict[str, list[float]] = {}
        for function in self.functions:
            for name, values in function.metrics.items():
                logged[name] = [*logged.get(name, []), *values]
        return logged

    @property
    def logged_extra(self) -> dict[str, list[Extra]]:
        """One value per completion, by column."""
        return {column: values for function in self.functions for column, values in function.extra.items()}

    def to_json(self) -> str:
        """Return JSON for the ledger, without the extra columns, which may be long texts."""
        functions = [msgspec.structs.replace(function, extra={}) for function in self.functions]
        return msgspec.json.encode(msgspec.structs.replace(self, functions=functions)).decode()

    @property
    def is_unscorable(self) -> bool:
        """True if no completion has a reward and a function timed out or failed."""
        return self.mean is None and any(function.outcome != "ok" for function in self.functions)


class EpisodeResults(msgspec.Struct, frozen=True):
    """Results of a group's environments, for reward functions. None: there are no environments."""

    rewards: list[float | None] | None = None
    """Per completion, the environment's own reward."""
    attributes: list[dict[str, Any]] | None = None
    """Per completion, the final attributes of the environment."""


class RewardWorkers:
    """Processes that run reward functions. Use as a context manager, or call `close`."""

    def __init__(self, config: RewardConfig) -> None:
        """Start the processes.

        Raises:
            RewardError: A function cannot be loaded in them.
            ProcessesExhausted: The machine has no room for them.
        """
        self._config = config
        self.latencies, self._retry_schedule = Latencies(), RetrySchedule(config.unreachable_s)
        self._pending: set[Future[GroupRewards]] = set()
        self._lock, self._closed = threading.Lock(), False
        self._pool = ProcessPool(partial(RewardProcess, config), limits_of(config))
        try:
            processes = self._load()
        except SlipstreamError:
            self._pool.close()
            raise
        loaded = next(process.loaded for process in processes if process.loaded is not None)
        self._asynchronous, self.with_environments = loaded.asynchronous, loaded.with_environments
        synchronous = set(config.functions) - self._asynchronous
        self._concurrent = self._serial = None
        if self._asynchronous:
            process = self._pool.start() if synchronous else processes.pop()
            self._concurrent = ConcurrentCalls(config, self._pool, process)
        for process in processes:
            self._pool.release(process) if synchronous else self._pool.drop(process)
        if synchronous:
            self._serial = SerialCalls(config, self._pool)
        self._retries = DelayedJobs(lambda job: self._queue_of(job).put(job))

    def _load(self) -> list[RewardProcess]:
        """Start the processes together and load the functions. A killed process is replaced at its first call."""
        processes = [self._pool.start() for _ in range(self._config.num_workers)]
        failures = [process.load() for process in processes]
        for failure in failures:
            if failure is not None and (failure.outcome != "killed" or None not in failures):
                raise RewardError(f"learner.reward.functions {failure.message}")
        return processes

    def __enter__(self) -> "RewardWorkers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(
        self,
        prompt: "Prompt",
        completions: Sequence[CompletionContent],
        completion_ids: Sequence[Sequence[int]],
        state: TrainerState,
        played: EpisodeResults = EpisodeResults(),  # noqa: B008  frozen
        built_in_completions: Sequence[CompletionContent] | None = None,
    ) -> "Future[GroupRewards]":
        """Score the completions of one prompt, or the messages of its episodes.

        The future cannot be canceled. `close` ends it with a RewardError. `built_in_completions`: the completions
        without special tokens, which built-in functions see. None: the completions have none.
        """
        plain = completions if built_in_completions is None else built_in_completions
        group: Future[GroupRewards] = Future()
        group.set_running_or_notify_cancel()
        ids = [array("i", one) for one in completion_ids]
        jobs = [
            Job(name, RewardCall(
                function, prompt.prompt, prompt.columns, list(plain if function in BUILT_IN else completions), ids,
                state, played.rewards,
                prompt.opens_reasoning and all(isinstance(one, str) for one in completions), prompt.prefill,
                played.attributes if function in self.with_environments else None, self._config.timeout_s, self._config,
            ), Future())
            for name, function in zip(self._config.names, self._config.functions, strict=True)
        ]  # fmt: skip
        for job in jobs:
            self._follow(job, group, jobs)
        with self._lock:
            if self._closed:
                raise RewardError("the reward workers are closed and score no more groups")
            self._pending.add(group)
        for job in jobs:
            self._queue_of(job).put(job)
        return group

    def close(self) -> None:
        """Kill the processes at once. Pending groups end with a RewardError."""
        with self._lock:
            self._closed = True
            pending, self._pending = self._pending, set()
        self._pool.close()
        self._retries.stop()
        for queue in (self._serial, self._concurrent):
            if queue is not None:
                queue.stop()
        for future in pending:
            future.set_exception(RewardError("the reward workers were closed before the group was scored"))

    def _follow(self, job: Job, group: "Future[GroupRewards]", jobs: list[Job]) -> None:
        job.future.add_done_callback(partial(self._record_latency, job))
        job.future.add_done_callback(partial(self._done, group, jobs, job))

    def _queue_of(self, job: Job) -> SerialCalls | ConcurrentCalls:
        queue = self._concurrent if job.call.function in self._asynchronous else self._serial
        assert queue is not None
        return queue

    def _record_latency(self, job: Job, _: "Future[Any]") -> None:
        if job.started_at is not None:
            self.latencies.record(job.name, time.monotonic() - job.started_at)

    def _done(self, group: "Future[GroupRewards]", jobs: list[Job], job: Job, _: "Future[Any]") -> None:
        """Finish the group if this was its last job and no retry is scheduled.

        This runs in the thread of the job's worker.
        """
        if self._call_again(group, jobs, job):
            return
        with self._lock:
            if group not in self._pending or not all(job.future.done() for job in jobs):
                return
            self._pending.discard(group)
        try:
            rewards = self._rewards_of(jobs)
        except Exception as error:  # a job's; raised where the group is awaited
            group.set_exception(error)
        else:
            group.set_result(rewards)

    def _call_again(self, group: "Future[GroupRewards]", jobs: list[Job], job: Job) -> bool:
        """Schedule a retry if the service was unreachable. Return whether there is one."""
        answer = None if job.future.exception() else job.future.result()
        if not isinstance(answer, ProcessFailure) or answer.outcome != "unreachable":
            if isinstance(answer, RewardAnswer):
                self._retry_schedule.record_reached(job.name)
            return False
        since, num_calls = job.unreached_since or time.monotonic(), job.num_unreached + 1
        delay_s = self._retry_schedule.again_in_s(job.name, since, num_calls, answer.problem)
        if delay_s is None:
            return False
        again = Job(job.name, job.call, Future(), num_unreached=num_calls, unreached_since=since)
        with self._lock:
            if group not in self._pending:
                return False
            jobs[jobs.index(job)] = again
        self._follow(again, group, jobs)
        self._retries.put(again, delay_s)
        return True

    def _rewards_of(self, jobs: list[Job]) -> GroupRewards:
        results = [_function_rewards(job) for job in jobs]
        rewards = [
            _total(self._config, results, [result.rewards[i] for result in results])
            for i in range(len(jobs[0].call.completions))
        ]
        return GroupRewards(rewards=rewards, functions=results)


class Latencies:
    """Call durations of each function since the last `pop_metrics`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def record(self, function: str, seconds: float) -> None:
        with self._lock:
            self._seconds[function].append(seconds)

    def pop_metrics(self) -> dict[str, float]:
        """Return the mean and the longest call of each function as metrics, and reset."""
        with self._lock:
            seconds, self._seconds = self._seconds, defaultdict(list)
        means = {f"reward_seconds/{name}": statistics.fmean(calls) for name, calls in seconds.items()}
        return means | {f"reward_seconds_max/{name}": max(calls) for name, calls in seconds.items()}


def spread(rewards: GroupRewards, is_shown_G: Sequence[bool]) -> GroupRewards:
    """Expand rewards to the whole group, with None for the episodes not shown."""
    if all(is_shown_G):
        return rewards

    def over_all(values: Sequence[T | None]) -> list[T | None]:
        shown = iter(values)
        return [next(shown) if is_shown else None for is_shown in is_shown_G]

    functions = [
        msgspec.structs.replace(
            one,
            rewards=over_all(one.rewards),
            extra={column: over_all(values) for column, values in one.extra.items()},
        )
        for one in rewards.functions
    ]
    return GroupRewards(rewards=over_all(rewards.rewards), functions=functions)


def _function_rewards(job: Job) -> FunctionRewards:
    answer, call = job.future.result(), job.call
    if isinstance(answer, RewardAnswer):
        return FunctionRewards(name=job.name, rewards=answer.rewards, metrics=answer.metrics, extra=answer.extra)
    message = (
        f"reward function {job.name} {answer.problem}, for {len(call.completions)} completions of prompt "
        f"{shorten(call.prompt)}, the first of them {shorten(call.completions[0])}"
    )
    return FunctionRewards(
        name=job.name,
        rewards=[None] * len(call.completions),
        outcome="failed" if answer.outcome == "killed" else answer.outcome,
        message=f"{message}; {answer.remedy}" if answer.remedy else message,
    )


def _total(config: RewardConfig, functions: Sequence[FunctionRewards], rewards: Sequence[float | None]) -> float | None:
    """Return the weighted sum for one completion, or None if it cannot be scored.

    A call that failed or timed out has no score, and the sum of the others would be another reward.
    """
    weighed = [one for one in zip(config.function_weights, functions, rewards, strict=True) if one[0] != 0]
    terms = [weight * reward for weight, _, reward in weighed if reward is not None]
    has_failed = any(function.outcome != "ok" for _, function, _ in weighed)
    is_whole = len(terms) == len(weighed) or config.on_none == "skip"
    return sum(terms) if terms and is_whole and not has_failed else None
