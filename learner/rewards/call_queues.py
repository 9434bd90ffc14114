"""Run calls in processes: one at a time in each, or many at once in one.

    SerialCalls      jobs ──▶ queue ──▶ threads with a process each    synchronous functions
    ConcurrentCalls  jobs ──▶ queue ──▶ one thread, one process        asynchronous, max_concurrent_calls at once
    DelayedJobs      jobs ──▶ heap of due times ──▶ one thread ──▶ one of these queues    retries

A queue differs from sandbox/pool.py, whose processes it takes: calls wait in it, and it repeats those of a
process that was killed from outside.

Invariant: a job ends with an answer or a ProcessFailure within its function's deadline, once it has started. A
process killed from outside is not the function's fault, so its call is repeated until it has lost
MAX_KILLED_CALLS processes.
"""

import heapq
import itertools
import logging
import multiprocessing
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import msgspec

from learner.config import RewardConfig
from learner.rewards.call import RewardAnswer, RewardCall
from learner.rewards.process import RewardProcess, answer_of
from learner.sandbox.pool import ProcessPool
from learner.sandbox.process import ProcessFailure

log = logging.getLogger(__name__)

MAX_KILLED_CALLS = 3
"""Number of killed processes after which a call has failed."""
MOST_SHARES = 8
"""Maximum number of parts into which timeout_s is divided to rate completions one by one.

An eighth is enough for a completion that can be rated.
"""
CANCEL_WAIT_S = 1.0
"""Seconds from an asynchronous call's deadline to the report of its cancellation.

A function that needs longer blocks the event loop.
"""
STOP_TIMEOUT_S = 5.0


class Job(msgspec.Struct, eq=False):
    """A call and the future that gets its result."""

    name: str
    call: RewardCall
    future: "Future[RewardAnswer | ProcessFailure]"
    num_killed: int = 0
    started_at: float | None = None
    """Time when the call was sent to its process. None while it waits."""
    deadline: float = 0.0
    num_unreached: int = 0
    """Number of earlier attempts that did not reach the function's service."""
    unreached_since: float | None = None
    """Time when the first of these attempts ended."""

    def should_repeat(self, failure: ProcessFailure) -> bool:
        """Count a killed process and return whether to repeat the call.

        Otherwise the job ends with the ProcessFailure.
        """
        self.num_killed += 1
        if self.num_killed >= MAX_KILLED_CALLS:
            return False
        log.warning("reward function %s %s; repeating the call", self.name, failure.problem)
        return True


class SerialCalls:
    """Threads that each run one call at a time, in a process from the pool."""

    def __init__(self, config: RewardConfig, pool: ProcessPool[RewardProcess]) -> None:
        self._config, self._pool = config, pool
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"rewards {number}", daemon=True)
            for number in range(config.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """Stop the threads, after the pool has closed. Queued jobs get no result."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(STOP_TIMEOUT_S)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None and not self._pool.is_closed:
            try:
                job.future.set_result(self._answer(job))
            except Exception as error:  # raised where the group is awaited
                job.future.set_exception(error)

    def _answer(self, job: Job) -> RewardAnswer | ProcessFailure:
        job.started_at = time.monotonic()
        while True:
            answer = self._call(job.call)
            if isinstance(answer, ProcessFailure) and answer.outcome == "timed_out" and job.call.is_by_completion:
                return self._one_by_one(job)
            if not isinstance(answer, ProcessFailure) or answer.outcome != "killed":
                return answer
            if self._pool.is_closed or not job.should_repeat(answer):
                return answer

    def _one_by_one(self, job: Job) -> RewardAnswer | ProcessFailure:
        """Rate each completion in a separate call, with a share of the time.

        A completion for which the function is still too slow has a reward of 0.
        """
        call, num_late = job.call, 0
        timeout_s = self._config.timeout_s / min(len(call.completions), MOST_SHARES)
        rewards: list[float | None] = []
        metrics: dict[str, list[float]] = {}
        for i in range(len(call.completions)):
            answer = self._call(call.only(i, timeout_s))
            if isinstance(answer, RewardAnswer):
                rewards += answer.rewards
                for name, values in answer.metrics.items():
                    metrics.setdefault(name, []).extend(values)
            elif answer.outcome == "timed_out":
                rewards.append(0.0)
                num_late += 1
            else:
                return answer
        log.warning(
            "reward function %s did not return within %g s; rated its %d completions one by one, of which %d timed out "
            "again and have a reward of 0 (learner.reward.timeout_s)",
            job.name, self._config.timeout_s, len(rewards), num_late,
        )  # fmt: skip
        return RewardAnswer(rewards, metrics)

    def _call(self, call: RewardCall) -> RewardAnswer | ProcessFailure:
        process = self._pool.acquire()
        try:
            return process.call(call)
        finally:
            self._pool.release(process)


class ConcurrentCalls:
    """One process whose event loop runs many calls concurrently.

    The process cancels a call at its deadline. If that does not help, the event loop is blocked and the
    process is killed. The calls past their deadline have then timed out, and the others are repeated.
    """

    def __init__(self, config: RewardConfig, pool: ProcessPool[RewardProcess], process: RewardProcess) -> None:
        self._config, self._pool, self._process = config, pool, process
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._in_flight: dict[int, Job] = {}
        self._num_sent = 0
        self._woken, self._wake = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._work, name="rewards, asynchronous", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)
        self._wake.send_bytes(b"\0")

    def stop(self) -> None:
        """Stop the thread, after the pool has closed. Queued jobs get no result."""
        self._wake.send_bytes(b"\0")
        self._thread.join(STOP_TIMEOUT_S)

    def _work(self) -> None:
        while not self._pool.is_closed:
            try:
                self._step()
            except Exception as error:  # raised where the groups are awaited
                for job in self._take_all():
                    job.future.set_exception(error)

    def _step(self) -> None:
        while self._woken.poll():
            self._woken.recv_bytes()
            if not self._jobs.empty():
                self._waiting.append(self._jobs.get())
        failure = self._send_waiting()
        if failure is None and not self._in_flight:
            self._woken.poll(None)
            return
        received = failure or self._process.next_reply(self._remaining_s(), self._woken)
        if isinstance(received, ProcessFailure):
            self._lost(received)
        elif received is not None:
            job = self._in_flight.pop(received.number, None)
            if job is not None:
                job.future.set_result(answer_of(received, job.call, self._config))
        elif self._remaining_s() == 0:
            self._lost(self._end_overdue())

    def _send_waiting(self) -> ProcessFailure | None:
        """Start waiting jobs up to the limit; return the ProcessFailure of a lost process.

        An unusable process without calls in flight is replaced first.
        """
        while self._waiting and len(self._in_flight) < self._config.max_concurrent_calls:
            if not self._process.is_usable:
                if self._in_flight:
                    return None
                self._replace()
            job = self._waiting[0]
            failure = self._process.load()
            if failure is None:
                self._num_sent += 1
                job.started_at = time.monotonic()
                job.deadline = job.started_at + job.call.timeout_s
                self._in_flight[self._num_sent] = self._waiting.popleft()
                failure = self._process.start_call(self._num_sent, job.call)
            elif failure.outcome != "killed" or not job.should_repeat(failure):
                self._waiting.popleft().future.set_result(failure)
            if failure is not None:
                return failure
        return None

    def _replace(self) -> None:
        self._pool.drop(self._process)
        self._process = self._pool.start()

    def _end_overdue(self) -> ProcessFailure:
        return self._process.end_overdue(self._config.timeout_s, self._process.limits.slow_remedy)

    def _remaining_s(self) -> float | None:
        """Return the seconds until the first call in flight is overdue.

        None: no call is in flight.
        """
        if not self._in_flight:
            return None
        first = min(job.deadline for job in self._in_flight.values())
        return max(0.0, first + CANCEL_WAIT_S - time.monotonic())

    def _lost(self, failure: ProcessFailure) -> None:
        """Handle the end of the process: end or repeat all calls in flight."""
        jobs, self._in_flight = self._in_flight, {}
        for job in reversed(jobs.values()):
            if failure.outcome == "timed_out" and time.monotonic() > job.deadline:
                job.future.set_result(self._end_overdue())
            elif self._pool.is_closed or not job.should_repeat(failure):
                job.future.set_result(failure)
            else:
                self._waiting.appendleft(job)

    def _take_all(self) -> Iterable[Job]:
        jobs = [*self._in_flight.values(), *self._waiting]
        self._in_flight.clear()
        self._waiting.clear()
        return jobs


class DelayedJobs:
    """Jobs that wait for the time of their retry, all in one thread."""

    def __init__(self, put: Callable[[Job], None]) -> None:
        """Start the thread, which passes jobs to `put` when they are due."""
        self._put = put
        self._jobs: list[tuple[float, int, Job]] = []
        """Heap by due time, then by order of arrival."""
        self._numbers = itertools.count()
        self._changed, self._is_stopped = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="rewards, retries", daemon=True)
        self._thread.start()

    def put(self, job: Job, delay_s: float) -> None:
        with self._changed:
            heapq.heappush(self._jobs, (time.monotonic() + delay_s, next(self._numbers), job))
            self._changed.notify()

    def stop(self) -> None:
        """Stop the thread. Waiting jobs get no result."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._thread.join(STOP_TIMEOUT_S)

    def _work(self) -> None:
        while (job := self._next_due()) is not None:
            self._put(job)

    def _next_due(self) -> Job | None:
        """Wait for the next job that is due. None: stopped."""
        with self._changed:
            while not self._is_stopped:
                delay_s = self._jobs[0][0] - time.monotonic() if self._jobs else None
                if delay_s is not None and delay_s <= 0:
                    return heapq.heappop(self._jobs)[2]
                self._changed.wait(delay_s)
        return None
