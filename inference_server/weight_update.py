"""Weight syncs on the server, one at a time. The learner's half is learner/servers/weight_transfer.py.

    learner: PushBegin ─▶ pausing ─▶ PushReady ─▶ receiving (and loading) ─▶ resuming ─▶ idle ─▶ PushDone
                             │                          │
                             └──── weights intact ──────┤ PushFailed, generation resumes with the old weights
                                                        ├ weights torn: PushFailed, paused until a whole sync
                                                        └ no answer in time: PushFailed, the engine restarts
    server.overlap_weight_loading: PushReady ─▶ receiving during generation ─▶ pausing ─▶ loading ─▶ resuming ─▶ idle

A session is one collective that several syncs share. After its first sync, a LoRA run sends only the adapter,
which one worker always receives during generation. Every wait has a deadline.
Invariant: each worker checks each bucket before it loads it, so only the learner's versions are served.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from typing import Literal, TypeVar

from inference_server.engine.containment import describe, record_unexpected
from inference_server.engine.interface import Engine, EngineDead, PushOrder, WorkerReport
from inference_server.engine.supervisor import in_time
from inference_server.requests import Deliver, Notify
from protocol.messages import Manifest, PushAbort, PushBegin, PushDone, PushFailed, PushReady
from protocol.weights.buckets import split_into_buckets

log = logging.getLogger(__name__)
T = TypeVar("T")
SLACK_S = 5.0
"""Extra seconds for a worker that stops at its deadline to send its report."""
PushState = Literal["idle", "pausing", "receiving", "loading", "resuming", "torn"]


class _SyncFailed(Exception):
    """A weight sync that did not complete, with the reason for the learner."""

    def __init__(self, reason: str, *, retryable: bool = True, interrupted: bool = False) -> None:
        super().__init__(reason)
        self.retryable, self.interrupted = retryable, interrupted


class WeightUpdates:
    """Weight syncs of the server, and the policy version that the engine serves."""

    def __init__(
        self,
        engine: Engine,
        deliver: Deliver,
        notify: Notify,
        pause_timeout_s: float,
        *,
        overlap_weight_loading: bool = False,
    ) -> None:
        self._engine, self._deliver, self._notify, self._pause_timeout_s = engine, deliver, notify, pause_timeout_s
        self._receive_overlap = overlap_weight_loading
        self._lock = asyncio.Lock()
        self._session: str | None = None
        self._aborted_sessions: set[str] = set()
        self._session_timeout_s = 0.0
        self._num_buckets = 0
        self._has_adapter = False
        """Whether later syncs of the session carry only an adapter."""
        self._abandoned = asyncio.Event()
        """Set once the learner has abandoned the current session."""
        self._weights_intact = True
        self._run: str | None = None
        """Run that is served."""
        self._term = 0
        """Number of runs served and engines started. Weights of an earlier term do not belong to the current
        run."""
        self._weights_term: int | None = None
        """Term of the current weights. None: no sync since the engine started."""
        self._paused_at: float | None = None
        """Start time of the current pause. None while the engine generates."""
        self.version: int | None = None
        self.checksum: str | None = None
        self.weights_run: str | None = None
        """Run of the current weights, whichever run is served. None: the model's own weights."""
        self.state: PushState = "idle"
        self.num_done = self.num_failed = 0
        self.stall_s = 0.0

    def generating_s(self) -> float:
        """Return the seconds of a clock that stops while generation is paused."""
        return (self._paused_at or time.monotonic()) - self.stall_s

    def begin_run(self, run: str) -> None:
        """Start a run, whose learner must sync weights before it requests groups.

        The current weights do not belong to this run, but keep answering /v1.
        """
        self._run = run
        self._term += 1

    @property
    def version_of_run(self) -> int | None:
        """Version of the current weights if this run has synced them, otherwise None."""
        return self.version if self._weights_term == self._term else None

    def forget_engine(self) -> None:
        """Reset the state for a new engine, which has the model's own weights.

        The synced weights are lost with the old engine. If there were any, the state is "torn".
        """
        self.num_failed += self.state not in ("idle", "torn")
        had_weights_of_a_run = self.num_done > 0 or not self._weights_intact
        self._weights_intact, self.state = not had_weights_of_a_run, "torn" if had_weights_of_a_run else "idle"
        self._session = self._paused_at = None
        self.version = self.checksum = self.weights_run = self._weights_term = None
        self._term += 1

    @property
    def is_ending(self) -> bool:
        """True while an abandoned sync is still running, which would delay a new sync."""
        return self._abandoned.is_set() and self._lock.locked()

    @property
    def engine_is_untouched(self) -> bool:
        """True until a sync first changes the model's own weights. A restart does not reset it."""
        return self.num_done == 0 and self._weights_intact

    async def push(self, begin: PushBegin) -> None:
        """Run one sync until PushDone or PushFailed is sent.

        Raises:
            EngineDead: The engine has died. The learner gets PushFailed first.
        """
        if begin.session != self._session:
            self._abandoned.set()  # A learner that starts another session has abandoned the current one.
        run, term = self._run, self._term
        async with self._lock:
            try:
                outcome = await self._outcome(begin, run, term)
            except EngineDead as dead:
                await self._notify(self.failed(begin, f"{dead}; the engine is restarted", weights_intact=False))
                raise
            await self._notify(outcome)

    async def abort(self, abort: PushAbort) -> None:
        """Leave a session.

        A sync that is receiving stops automatically, because the learner has closed its side.

        Raises:
            EngineDead: The engine has died or does not answer in time.
        """
        self._aborted_sessions.add(abort.session)
        if abort.session == self._session:
            self._abandoned.set()
        async with self._lock:
            if abort.session == self._session:
                self._session = None
                await self._call_in_time(self._engine.leave_session(abort.session), f"leaving session {abort.session}")

    async def _outcome(self, begin: PushBegin, run: str | None, term: int) -> PushDone | PushFailed:
        try:
            done = await self._load_and_label(begin, run, term)
        except _SyncFailed as failure:
            return await self._drop_session(
                begin, str(failure), retryable=failure.retryable, interrupted=failure.interrupted
            )
        except EngineDead:
            raise
        except Exception as error:
            record_unexpected(error, f"receiving version {begin.version}")
            return await self._drop_session(begin, describe(error), retryable=True)
        self.num_done += 1
        return done

    async def _load_and_label(self, begin: PushBegin, run: str | None, term: int) -> PushDone:
        """Load and label the weights of a sync that `run` started in `term`."""
        if term != self._term:
            raise _SyncFailed(f"run {run}, which started this weight sync, is no longer served")
        self._enter_session(begin)
        order = PushOrder(
            session=begin.session, version=begin.version, rendezvous=begin.rendezvous, manifest=begin.manifest
        )
        is_small = self._has_adapter and begin.manifest is None and self._engine.limits.num_workers == 1
        if self._receive_overlap or is_small:
            self.state = "receiving"
            await self._send_ready(begin)
            self._agreed_checksum(await self._receive(self._engine.stage_push(order)))
            pause_s = await self._pause()
            self.state = "loading"
        else:
            pause_s = await self._pause()
            self.state = "receiving"
            await self._send_ready(begin)
        reports = await self._load(order)
        checksum = self._agreed_checksum(reports)
        self.state = "resuming"
        await self._call_in_time(self._engine.set_version(begin.version), "setting the version")
        self._weights_intact = True
        self.version, self.checksum, self.weights_run, self._weights_term = begin.version, checksum, run, term
        stall_s = await self._resume()
        return PushDone(
            session=begin.session, version=begin.version, checksum=checksum, pause_s=pause_s,
            receive_s=max(report.join_s + report.receive_s for report in reports),
            load_s=max(report.load_s for report in reports), stall_s=stall_s,
        )  # fmt: skip

    async def _send_ready(self, begin: PushBegin) -> None:
        if not await self._deliver(PushReady(session=begin.session, version=begin.version)):
            raise _SyncFailed("PushReady could not be sent, because the learner is unreachable")

    def _enter_session(self, begin: PushBegin) -> None:
        if begin.session in self._aborted_sessions:
            raise _SyncFailed(
                f"the learner abandoned session {begin.session} while the weight sync waited", interrupted=True
            )
        if begin.rendezvous is not None and begin.manifest is not None:
            self._check_adapter(begin.manifest)
            self._has_adapter = begin.manifest.adapter is not None
            self._session, self._session_timeout_s = begin.session, begin.rendezvous.timeout_s
            self._num_buckets = len(split_into_buckets(begin.manifest))
            self._abandoned.clear()
        elif begin.session != self._session:
            raise _SyncFailed(
                f"the weight sync names session {begin.session} without rendezvous and manifest, and the server is in "
                f"session {self._session}; start a new session"
            )

    def _check_adapter(self, manifest: Manifest) -> None:
        max_rank = self._engine.limits.max_lora_rank
        if manifest.adapter is not None and manifest.adapter.rank > max_rank:
            raise _SyncFailed(
                f"the adapter of the weight sync has rank {manifest.adapter.rank}, and this server supports a rank of "
                f"up to {max_rank}; set server.max_lora_rank = {manifest.adapter.rank}",
                retryable=False,
            )

    async def _receive(self, reports: Awaitable[Sequence[WorkerReport]]) -> Sequence[WorkerReport]:
        """Wait for the workers' reports.

        The time limit covers all broadcasts. After the learner abandons the session, it covers one.
        """
        receiving = asyncio.ensure_future(reports)
        abandoned = asyncio.create_task(self._abandoned.wait())
        longest_s = (2 + self._num_buckets) * self._session_timeout_s + SLACK_S
        try:
            await asyncio.wait([receiving, abandoned], timeout=longest_s, return_when="FIRST_COMPLETED")
            # A worker applies the deadline of its current broadcast. Past that deadline, the worker is stuck.
            knob = f"learner.weight_sync.timeout_s + {SLACK_S:g}"
            return await in_time(receiving, self._session_timeout_s + SLACK_S, self.state, knob)
        finally:
            abandoned.cancel()
            receiving.cancel()

    async def _load(self, order: PushOrder) -> Sequence[WorkerReport]:
        # Assume the worst until the workers report: a worker that never reports may have loaded some layers.
        was_intact, self._weights_intact = self._weights_intact, False
        reports = await self._receive(self._engine.load_push(order))
        self._weights_intact = was_intact and all(report.weights_intact and not report.ok for report in reports)
        return reports

    def _agreed_checksum(self, reports: Sequence[WorkerReport]) -> str:
        failed = [report for report in reports if not report.ok]
        if failed:
            raise _SyncFailed(
                "; ".join(f"worker {report.rank} failed while {report.state}: {report.error}" for report in failed),
                retryable=all(report.retryable for report in failed),
                interrupted=all(report.interrupted for report in failed),
            )
        checksums = {report.checksum for report in reports}
        if len(checksums) != 1:
            raise _SyncFailed(f"the workers received different bytes, checksums {sorted(checksums)}")
        return checksums.pop()

    async def _drop_session(
        self, begin: PushBegin, reason: str, *, retryable: bool, interrupted: bool = False
    ) -> PushFailed:
        """Drop the session, and resume generation if the weights are intact."""
        failed = self.failed(
            begin, reason, weights_intact=self._weights_intact, retryable=retryable, interrupted=interrupted
        )
        self._session = None
        log.warning(
            "weight sync of version %d in session %s failed while %s: %s",
            begin.version, begin.session, failed.state, reason,
        )  # fmt: skip
        if not self._weights_intact:
            self.state = "torn"
            log.warning("the weights are neither old nor new; generation waits for a complete weight sync")
        elif self._paused_at is not None:
            await self._resume()
        else:
            self.state = "idle"
        self.num_failed += 1  # If the engine dies instead, forget_engine counts the failure.
        return failed

    def failed(
        self, begin: PushBegin, reason: str, *, weights_intact: bool, retryable: bool = True, interrupted: bool = False
    ) -> PushFailed:
        return PushFailed(
            session=begin.session, version=begin.version, state=self.state, message=reason,
            weights_intact=weights_intact, retryable=retryable, interrupted=interrupted,
        )  # fmt: skip

    async def _pause(self) -> float:
        """Pause generation and return the seconds that pausing took."""
        started = time.monotonic()
        self.state = "pausing"
        # Set before the call, because a pause that misses its deadline may still take effect.
        self._paused_at = self._paused_at or started
        await self._call_in_time(self._engine.pause(), "pausing")
        return time.monotonic() - started

    async def _resume(self) -> float:
        """Resume generation and return the seconds without generation."""
        self.state = "resuming"
        try:
            await self._call_in_time(self._engine.resume(), "resuming")
        except EngineDead:
            raise
        except Exception as error:
            record_unexpected(error, "resuming generation")
            raise EngineDead(f"generation could not be resumed after a weight sync: {describe(error)}") from error
        self.state = "idle"
        assert self._paused_at is not None
        stall_s = time.monotonic() - self._paused_at
        self._paused_at = None
        self.stall_s += stall_s
        return stall_s

    async def _call_in_time(self, call: Awaitable[T], doing: str) -> T:
        return await in_time(call, self._pause_timeout_s, doing, "server.pause_timeout_s")
