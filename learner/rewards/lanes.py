"""Run calls in processes: one at a time in each, or many at once in one.

    Serial       jobs ──▶ queue ──▶ threads with a process each    synchronous functions
    Concurrent   jobs ──▶ queue ──▶ one thread, one process        asynchronous, max_concurrent_calls at once

Invariant: a job ends with an answer or a WorkerFailure within its function's deadline, once it has started. A
process killed from outside is not the function's fault. Its call is repeated, until it has lost
MAX_KILLED_CALLS processes.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

import msgspec

from learner.config import RewardConfig
from learner.rewards.call import Answer, Call
from learner.rewards.process import CONTEXT, RewardProcess, WorkerFailure, answer_of, too_late
from protocol.errors import RewardError

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
    call: Call
    future: "Future[Answer | WorkerFailure]"
    num_killed: int = 0
    begun_at: float | None = None
    """Time when the call was sent to its process. None while it waits."""
    deadline: float = 0.0
    num_unreached: int = 0
    """Number of earlier attempts that did not reach the function's service."""
    unreached_since: float | None = None
    """Time when the first of these attempts ended."""

    def is_to_repeat(self, trouble: WorkerFailure) -> bool:
        """Count a killed process and return whether to repeat the call.

        Otherwise the job ends with the WorkerFailure.
        """
        self.num_killed += 1
        if self.num_killed >= MAX_KILLED_CALLS:
            return False
        log.warning("reward function %s %s; it is called again", self.name, trouble.problem)
        return True


class Serial:
    """Threads with one process each."""

    def __init__(self, config: RewardConfig, processes: list[RewardProcess]) -> None:
        self._config, self._processes = config, processes
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"rewards {worker}", daemon=True)
            for worker in range(len(processes))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Kill the processes at once. Queued jobs get no result."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(STOP_TIMEOUT_S)

    def _work(self, worker: int) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            try:
                job.future.set_result(self._answer(worker, job))
            except Exception as error:  # raised where the group is awaited
                job.future.set_exception(error)

    def _answer(self, worker: int, job: Job) -> Answer | WorkerFailure:
        job.begun_at = time.monotonic()
        while True:
            answer = self._process(worker).call(job.call)
            if isinstance(answer, WorkerFailure) and answer.outcome == "timed_out" and job.call.is_by_completion:
                return self._one_by_one(worker, job)
            if not isinstance(answer, WorkerFailure) or answer.outcome != "killed":
                return answer
            if self._closed or not job.is_to_repeat(answer):
                return answer

    def _one_by_one(self, worker: int, job: Job) -> Answer | WorkerFailure:
        """Rate each completion in a separate call, with a share of the time.

        A completion for which the function is still too slow has a reward of 0.
        """
        call, num_late = job.call, 0
        timeout_s = self._config.timeout_s / min(len(call.completions), MOST_SHARES)
        rewards: list[float | None] = []
        for place in range(len(call.completions)):
            answer = self._process(worker).call(call.only(place, timeout_s))
            if isinstance(answer, Answer):
                rewards += answer.rewards
            elif answer.outcome == "timed_out":
                rewards.append(0.0)
                num_late += 1
            else:
                return answer
        log.warning(
            "reward function %s did not return within %g s: its %d completions were rated one by one, and %d that it was still too slow "
            "for have a reward of 0 (learner.reward.timeout_s)",
            job.name, self._config.timeout_s, len(rewards), num_late,
        )  # fmt: skip
        return Answer(rewards)

    def _process(self, worker: int) -> RewardProcess:
        """Return the worker's process, or a new one if it is no longer usable.

        Raises:
            RewardError: If the workers are closed.
        """
        process = self._processes[worker]
        if process.is_usable:
            return process
        process.kill()
        with self._lock:
            if self._closed:
                raise RewardError("the reward workers are closed")
            self._processes[worker] = RewardProcess(self._config)
        return self._processes[worker]


class Concurrent:
    """One process whose event loop runs many calls concurrently.

    The process cancels a call at its deadline. If that does not help, the event loop is blocked and the
    process is killed. The calls past their deadline have then timed out, and the others are repeated.
    """

    def __init__(self, config: RewardConfig, process: RewardProcess) -> None:
        self._config, self._process = config, process
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._in_flight: dict[int, Job] = {}
        self._num_sent = 0
        self._lock, self._closed = threading.Lock(), False
        self._woken, self._wake = CONTEXT.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._work, name="rewards, asynchronous", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)
        self._wake.send_bytes(b"\0")

    def close(self) -> None:
        """Kill the process. Queued jobs get no result."""
        with self._lock:
            self._closed = True
            self._process.kill()
        self._wake.send_bytes(b"\0")
        self._thread.join(STOP_TIMEOUT_S)

    def _work(self) -> None:
        while not self._closed:
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
        trouble = self._send_waiting()
        if trouble is None and not self._in_flight:
            self._woken.poll(None)
            return
        received = trouble or self._process.receive(self._remaining_s(), self._woken)
        if isinstance(received, WorkerFailure):
            self._lost(received)
        elif received is not None:
            job = self._in_flight.pop(received.number, None)
            if job is not None:
                job.future.set_result(answer_of(received, self._config))
        elif self._remaining_s() == 0:
            self._lost(self._process.killed_late())

    def _send_waiting(self) -> WorkerFailure | None:
        """Start waiting jobs up to the limit; return the WorkerFailure of a lost process.

        An unusable process without calls in flight is replaced first.
        """
        while self._waiting and len(self._in_flight) < self._config.max_concurrent_calls:
            if not self._process.is_usable:
                if self._in_flight:
                    return None
                self._replace()
            job = self._waiting[0]
            trouble = self._process.load()
            if trouble is None:
                self._num_sent += 1
                job.begun_at = time.monotonic()
                job.deadline = job.begun_at + job.call.timeout_s
                self._in_flight[self._num_sent] = self._waiting.popleft()
                trouble = self._process.send(self._num_sent, job.call)
            elif not job.is_to_repeat(trouble):
                self._waiting.popleft().future.set_result(trouble)
            if trouble is not None:
                return trouble
        return None

    def _replace(self) -> None:
        self._process.kill()
        with self._lock:
            if not self._closed:
                self._process = RewardProcess(self._config)

    def _remaining_s(self) -> float | None:
        """Return the seconds until the first call in flight is overdue.

        None: no call is in flight.
        """
        if not self._in_flight:
            return None
        first = min(job.deadline for job in self._in_flight.values())
        return max(0.0, first + CANCEL_WAIT_S - time.monotonic())

    def _lost(self, trouble: WorkerFailure) -> None:
        """Handle the end of the process: end or repeat all calls in flight."""
        jobs, self._in_flight = self._in_flight, {}
        for job in reversed(jobs.values()):
            if trouble.outcome == "timed_out" and time.monotonic() > job.deadline:
                job.future.set_result(too_late(self._config, "was killed"))
            elif self._closed or not job.is_to_repeat(trouble):
                job.future.set_result(trouble)
            else:
                self._waiting.appendleft(job)

    def _take_all(self) -> Iterable[Job]:
        jobs = [*self._in_flight.values(), *self._waiting]
        self._in_flight.clear()
        self._waiting.clear()
        return jobs
