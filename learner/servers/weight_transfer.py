"""One attempt to sync a version to all servers of a session. weight_sync.py decides when, and with which servers.

    PushBegin ─▶ PushReady ─▶ buckets over the collective ─▶ PushDone(checksum) ─▶ compared

The servers' side is inference_server/weight_update.py; protocol/weights/ encodes the bytes. Every arrow has
the deadline `learner.weight_sync.timeout_s`. If other servers wait, a late one costs them
`learner.weight_sync.straggler_timeout_s`. After any failure all sides abandon the session: the servers that
have failed or are late are named, and the others were only interrupted.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Literal

import msgspec
from tqdm import tqdm

from learner.config import WeightSyncConfig
from learner.servers.loop_thread import LoopThread
from learner.servers.membership import Member
from learner.servers.stragglers import late_ranks
from learner.servers.sync_session import Failure, SyncSession
from protocol.console import PROGRESS_EVERY_S, output_mode
from protocol.errors import DeadlineExceeded, PushError, PushInterrupted
from protocol.messages import PushDone
from protocol.weights.buckets import NamedTensors
from protocol.weights.dense import Sent

log = logging.getLogger(__name__)
CHECK_INTERVAL_S = 0.1
"""Interval between two checks for servers that have failed or are late."""
ROLL_CALL_S = 1.5
"""Time after a failure in which every healthy server tells that it was interrupted."""
Stage = Literal["pausing", "joining", "sending", "finishing"]
"""Stage of a sync: waiting for PushReady, for the workers, for the transfer, or for PushDone."""
PROGRESS_BYTES = 1 << 30
"""Size above which a sync shows a progress bar."""


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one sync: durations in seconds, and bytes sent."""

    total_s: float
    transfer_s: float
    load_s: float
    stall_s: float
    num_bytes: int
    pause_s: float
    """Time until the server had paused."""

    def metrics(self) -> dict[str, float]:
        return {
            "weight_sync/seconds": self.total_s,
            "weight_sync/transfer_seconds": self.transfer_s,
            "weight_sync/load_seconds": self.load_s,
            "weight_sync/stall_seconds": self.stall_s,
            "weight_sync/bytes": self.num_bytes,
        }


class SyncAttempt:
    """One attempt to sync a version to all servers of a session. `end` is thread-safe."""

    def __init__(
        self, session: SyncSession, version: int, loop: LoopThread, config: WeightSyncConfig,
        *, others_serve: bool, on_wait: Callable[[], object],
    ) -> None:  # fmt: skip
        """Prepare an attempt.

        Args:
            others_serve: Whether other servers have weights of this run and do not wait.
            on_wait: Called repeatedly while the caller of `run` waits.
        """
        self._session, self._version, self._loop, self._config = session, version, loop, config
        self._others_serve, self._on_wait = others_serve, on_wait
        self.stage: Stage = "pausing"
        self._moved_at = time.monotonic()
        """Time of the last progress: a new stage, or more bytes."""
        self._transfer_at = self._moved_at
        """Time when the workers were to join or receive."""
        self._first_at: float | None = None
        """Time when the first server was seen to be ready, or to be done."""
        self._replies: Mapping[Member, Future[Any]] = {}
        """The servers' replies in the current stage."""
        self._failures: dict[Member, Failure] = {}
        self._end_reason: str | None = None
        self._lock = threading.Lock()
        """Held by the thread that looks for failures while another one sends."""
        self._is_sending = False

    def run(self, tensors: NamedTensors) -> tuple[dict[Member, SyncReport], dict[Member, Failure]]:
        """Send the tensors that the session carries next, and return the reports and the failures.

        A server in neither was interrupted by the failure of others. After anything but a report of every server,
        the session must be closed. Errors of the tensors are raised.
        """
        started = time.monotonic()
        sent, ready, transferred = None, started, started
        done: Mapping[Member, Future[PushDone]] = {}
        try:
            self._wait_for_ready()
            ready = time.monotonic()
            done = self._replies = {
                member: self._loop.submit(member.link.finish_push(self._session.name)) for member in self._members
            }
            sent = self._transfer(tensors)
            transferred = time.monotonic()
            self._finish(sent)
        except PushError as error:
            self._session.abort()
            self._call_roll(error)
        except BaseException:
            self._session.abort()
            raise
        finally:
            for reply in self._replies.values():
                reply.cancel()
        reports = {}
        for member, reply in done.items():
            if sent is None or member in self._failures or reply.cancelled() or self._error_of(member) is not None:
                continue
            arrived = reply.result()
            if arrived.checksum != sent.checksum:
                self._failures[member] = PushError(
                    f"the weights of version {self._version} arrived with checksum {arrived.checksum}; expected "
                    f"{sent.checksum}"
                )
                continue
            reports[member] = SyncReport(
                total_s=time.monotonic() - started, transfer_s=transferred - ready, load_s=arrived.load_s,
                stall_s=arrived.stall_s, num_bytes=sent.num_bytes, pause_s=arrived.pause_s,
            )  # fmt: skip
        return reports, self._failures

    def end(self, reason: str) -> None:
        """Make the attempt fail with this reason, wherever it waits."""
        self._end_reason = reason
        self._session.abort()

    @property
    def _members(self) -> tuple[Member, ...]:
        return tuple(self._session.members)

    def _enter(self, stage: Stage) -> None:
        self.stage, self._moved_at, self._first_at = stage, time.monotonic(), None

    def _wait_for_ready(self) -> None:
        """Wait for PushReady of all servers. Raises PushError as soon as one has failed or is late."""
        timeout_s = self._config.timeout_s
        self._replies = {
            member: self._loop.submit(member.link.begin_push(self._session.begin(member, self._version), timeout_s))
            for member in self._members
        }
        while pending := self._pending():
            self._on_wait()
            self._check()
            wait([self._replies[member] for member in pending], CHECK_INTERVAL_S, FIRST_EXCEPTION)
        self._check()

    def _finish(self, sent: Sent) -> None:
        """Wait until each server is done, has failed or is late. The first failure ends the session.

        Servers that have received everything still load it then.
        """
        self._enter("finishing")
        deadline = time.monotonic() + self._config.timeout_s
        while pending := self._pending():
            self._on_wait()
            if self._end_reason is not None:
                raise PushError(self._end_reason)
            if time.monotonic() > deadline:
                late = (
                    f"no PushDone for version {self._version} in session {self._session.name} within "
                    f"{self._config.timeout_s:g} s after the last of {sent.num_bytes} bytes "
                    "(learner.weight_sync.timeout_s)"
                )
                self._failures |= {member: DeadlineExceeded(late) for member in pending}
            if failures := self._late() | self._own_failures():
                self._failures |= failures
                self._session.abort()
                self._first_at = time.monotonic()  # those that it interrupts need a moment to tell
            wait([self._replies[member] for member in pending], CHECK_INTERVAL_S, FIRST_EXCEPTION)
        self._failures |= self._own_failures()
        if not self._failures:  # if any was interrupted, nobody knows who has failed
            errors = {member: self._error_of(member) for member in self._members}
            self._failures = {member: error for member, error in errors.items() if isinstance(error, PushError)}

    def _transfer(self, tensors: NamedTensors) -> Sent:
        """Join the session if needed, and send, while the loop looks for servers that fail or are late."""
        self._transfer_at = time.monotonic()
        if self._session.collective is None:
            self._enter("joining")
            self._join()
        self._enter("sending")
        self._is_sending = True
        guard = self._loop.submit(self._guard())
        num_bytes = self._session.num_bytes

        def progress(num_more: int) -> None:
            self._moved_at = time.monotonic()
            bar.update(num_more)

        try:
            with tqdm(
                total=num_bytes, unit="B", unit_scale=True, desc=f"weight sync {self._version}",
                mininterval=PROGRESS_EVERY_S, disable=num_bytes < PROGRESS_BYTES or not output_mode().has_bars,
            ) as bar:  # fmt: skip
                return self._session.send(tensors, progress)
        finally:
            with self._lock:
                self._is_sending = False
            guard.cancel()

    def _join(self) -> None:
        """Wait until every worker has joined, or until a server has failed or is late."""
        with ThreadPoolExecutor(1, "weight-sync-join") as thread:
            joining = thread.submit(self._session.join)
            try:
                while not wait([joining], CHECK_INTERVAL_S).done:
                    self._on_wait()
                    self._check()
            except BaseException:
                self._session.abort()
                raise
            joining.result()

    async def _guard(self) -> None:
        """Abort the session once a server has failed or is late."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            with self._lock:
                if not self._is_sending:
                    return
                try:
                    self._check()
                except Exception:  # the thread that sends finds out why
                    self._session.abort()
                    return

    def _pending(self) -> list[Member]:
        return [member for member, reply in self._replies.items() if not reply.done() and member not in self._failures]

    def _error_of(self, member: Member) -> BaseException | None:
        reply = self._replies[member]
        return reply.exception() if reply.done() and not reply.cancelled() else None

    def _check(self) -> None:
        """Raise PushError if a server has failed or is late, or if the attempt was ended."""
        if self._end_reason is not None:
            raise PushError(self._end_reason)
        self._failures |= self._late()
        for member in self._members:
            error = self._failures.get(member) or self._error_of(member)
            if isinstance(error, PushError | DeadlineExceeded):
                raise PushError(f"the server at {member.endpoint} ended it: {error}")
            if error is not None:
                raise error

    # --- who is to blame -----------------------------------------------------------------------------------------

    def _late(self) -> dict[Member, Failure]:
        """Return the servers for which others wait too long. If all are late, none is: no other server waits."""
        if not self._others_serve and len(self._members) == 1:
            return {}
        patience_s, pending = self._config.straggler_timeout_in_effect_s, self._pending()
        limit = f"{patience_s:g} s ({self._config.straggler_timeout_key})"
        if late := self._with_late_workers(pending, patience_s):
            return _failed(late, f"it kept the weight sync waiting for {limit}; it gets another weight sync")
        if self._is_outrun(pending, patience_s):
            first_has = "failed" if self._failures else "was ready" if self.stage == "pausing" else "had the version"
            reason = f"another server {first_has} {limit} earlier; it gets its own weight sync"
        elif self._others_serve and self._stalled_s() > patience_s:
            reason = (
                f"it has made no progress for {limit}, and the other servers do not wait; it gets another weight sync"
            )
        else:
            return {}
        return _failed(self._not_held_up(pending), reason)

    def _with_late_workers(self, pending: list[Member], patience_s: float) -> list[Member]:
        """Return the servers whose workers hold up the transfer, unless no server waits for them."""
        if self.stage == "pausing" or self._failures:  # once the session is off, healthy workers report no more
            return []
        ranks = self._late_ranks(patience_s)
        late = [member for member in pending if ranks.intersection(self._session.ranks[member])]
        return late if self._others_serve or len(late) < len(self._members) else []

    def _is_outrun(self, pending: list[Member], patience_s: float) -> bool:
        """Return whether another server has been through with this stage for longer than the patience."""
        if self.stage not in ("pausing", "finishing"):
            return False
        if self._first_at is None and len(pending) < len(self._members):
            self._first_at = time.monotonic()
        return self._first_at is not None and time.monotonic() - self._first_at > patience_s

    def _late_ranks(self, patience_s: float) -> set[int]:
        collective = self._session.collective
        parents = collective.parents if collective is not None else {}
        return late_ranks(self._session.states(self._transfer_at), parents, self._blocked_s(), patience_s)

    def _stalled_s(self) -> float:
        """Return how long nothing has moved."""
        stalled_s = time.monotonic() - self._moved_at
        blocked_s = self._blocked_s() if self.stage == "sending" else {}
        # `_moved_at` changes once per span. On a slow link, a span takes longer than the others wait.
        return min(stalled_s, max(blocked_s.values(), default=stalled_s))

    def _blocked_s(self) -> Mapping[int, float]:
        return self._session.collective.blocked_s() if self._session.collective is not None else {}

    def _not_held_up(self, pending: list[Member]) -> list[Member]:
        """Return those of the servers that no longer wait for others to hand on bytes, or all if each does."""
        done = [member for member in self._members if member not in pending and member not in self._failures]
        at_fault = [one for one in pending if not self._session.is_held_up(one, self._transfer_at, done)]
        return at_fault or pending

    def _call_roll(self, error: PushError) -> None:
        """Find the servers that failed, after the session was aborted because of an error.

        A healthy server then tells soon that it was interrupted. One that says nothing is at fault. If all are
        healthy, nobody knows who failed, and the sync has failed for all.
        """
        deadline = time.monotonic() + ROLL_CALL_S
        while not self._failures and self._end_reason is None:
            self._failures |= {member: _with(cause, error) for member, cause in self._own_failures().items()}
            pending = self._pending()
            if not self._failures and (not pending or time.monotonic() > deadline):
                for member in pending or self._members:
                    cause = self._error_of(member)
                    self._failures[member] = _with(cause, error) if isinstance(cause, PushError) else error
            self._on_wait()
            wait([self._replies[member] for member in pending], CHECK_INTERVAL_S, FIRST_EXCEPTION)
        if self._end_reason is not None:
            self._failures = dict.fromkeys(self._members, PushError(self._end_reason))

    def _own_failures(self) -> dict[Member, Failure]:
        """Return the errors of servers that have failed themselves, and were not only interrupted."""
        errors = {member: self._error_of(member) for member in self._members if member not in self._failures}
        return {
            member: error
            for member, error in errors.items()
            if isinstance(error, PushError | DeadlineExceeded) and not isinstance(error, PushInterrupted)
        }


def _failed(members: list[Member], reason: str) -> dict[Member, Failure]:
    return {member: PushError(reason) for member in members}


def _with(cause: Failure, effect: PushError) -> Failure:
    """Return the failure of a server, with what it did to the transfer."""
    return type(cause)(f"{cause}; the transfer failed: {effect}") if str(cause) not in str(effect) else cause
