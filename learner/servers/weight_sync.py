"""Sync the policy's weights to all servers of the fleet. weight_transfer.py makes one attempt at a set of them.

    new weights ─▶ all servers with older ones of this run      one session, read and sent once
    a server without weights ─▶ a sync of its own               the other servers continue to generate

Servers share a session if one collective can connect them all: the same transport, and the same address of
the learner. When one fails or is late, the others go on at once in a new session without it. It gets no
requests until a later sync of its own, which starts automatically after a pause. A sync has succeeded when
one server has the weights. While no server has them, the sync is retried at once,
`learner.weight_sync.max_attempts` times. With `learner.weight_sync.overlap_with_training`, a sync sends a copy
of the weights from its own thread, one sync at a time. sync_source.py decides what a sync sends.
Invariant: servers that nobody waits for are not dropped as stragglers. Only `learner.weight_sync.timeout_s`
limits their sync.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial

import msgspec
import torch

from learner.config import WeightSyncConfig
from learner.servers.fleet import Fleet
from learner.servers.membership import Member
from learner.servers.sync_session import Failure, SyncSessions
from learner.servers.sync_source import SyncSource, Weights
from learner.servers.weight_copy import WeightCopy
from learner.servers.weight_transfer import Stage, SyncAttempt, SyncReport
from protocol.errors import ConfigError, DataError, PushError, PushIncomplete, ServerLost, SlipstreamError
from protocol.messages import Manifest
from protocol.weights.buckets import NamedTensors

log = logging.getLogger(__name__)
WAIT_SLICE_S = 0.5
SHUTTING_DOWN = "the learner is shutting down"
LEAST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0
"""Bounds of the pause after a failed sync. Each consecutive failure doubles the pause."""
Tensors = Callable[..., NamedTensors]
"""Source of a sync. With `adapter_alone`: only of the tensors that a later sync of a session carries."""
CALL_TIMEOUT_S = 10.0
"""Maximum wait in seconds for the event loop, which may be stuck."""


class Round(msgspec.Struct, eq=False):
    """Outcome of one round of attempts."""

    reports: dict[Member, SyncReport] = {}
    failures: dict[Member, Failure] = {}
    stages: dict[Member, Stage] = {}
    """Stage in which each failed server was."""
    num_bytes: int = 0
    """Bytes that left the learner in the attempts that succeeded."""


class WeightSync:
    """Weight sync to the servers of one fleet."""

    def __init__(
        self, fleet: Fleet, weights: Weights, config: WeightSyncConfig, check: Callable[[Member], None] = lambda _: None
    ) -> None:
        """`check` raises ConfigError or DataError for a server that does not fit the run."""
        self._fleet, self._config, self._check = fleet, config, check
        self._sessions = SyncSessions(fleet.loop, config, weights.device)
        self._attempt: SyncAttempt | None = None
        """Attempt in progress."""
        self._done: dict[Member, tuple[str, int]] = {}
        """Server id and version of each member's last sync, unless it failed."""
        self._failures: dict[Member, tuple[int, float]] = {}
        """Number of consecutive failures of a server, and the end of its pause."""
        self._newest: int | None = None
        """Last version that a server received."""
        self._newest_report: SyncReport | None = None
        self._source = SyncSource(weights, config)
        self.sample = self._source.sample
        self._copy = WeightCopy(weights.wire_dtype, weights.copy_device)
        self._thread = ThreadPoolExecutor(1, "weight-sync")
        is_on_gpu = weights.device.type == "cuda"
        self._stream = torch.cuda.Stream(weights.device) if is_on_gpu else None
        """Stream of the syncs that `begin` starts. One for all, because each stream has memory of its own."""
        self._pending: Future[SyncReport | None] | None = None
        self._report: SyncReport | None = None
        """Report of the last sync that `begin` started, until it is taken."""
        self._closing = threading.Event()

    @property
    def is_syncing(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def received(self, version: int) -> dict[Member, str]:
        """Return the servers that received this version, each with its id, whether or not they are connected now."""
        return {member: server_id for member, (server_id, done) in list(self._done.items()) if done == version}

    def holders(self, version: int | None = None) -> list[Member]:
        """Return the connected servers that have this version, or any version of this run."""
        return [
            member
            for member in self._fleet.connected()
            if (done := self._done.get(member)) is not None
            and (welcome := member.welcome) is not None
            and welcome.server_id == done[0]
            and version in (None, done[1])
        ]

    def joiners(self) -> list[Member]:
        """Return the servers without the newest weights that are due for their own sync."""
        holders, now = self.holders(self._newest) if self._newest is not None else [], time.monotonic()
        without = [member for member in self._fleet.connected() if member not in holders]
        return [member for member in without if not holders or self._failures.get(member, (0, 0.0))[1] <= now]

    def send(self, version: int, members: list[Member] | None = None) -> SyncReport | None:
        """Send the current weights as `version` to these servers.

        By default the servers are all that have older weights. Returns None if no sync succeeded but other
        servers have the weights, or the run is interrupted while no server is connected.

        Raises:
            PushError: `max_attempts` attempts failed, and no server has the weights.
            PushIncomplete: The last server cannot take the weights.
        """
        self.wait()
        return self._send_until_done(version, partial(self._source.tensors, version), members)

    def begin(self, version: int, when_done: Callable[[], object]) -> None:
        """Copy the weights and sync the copy in a thread, which then calls `when_done`.

        Raises the error of the previous sync.
        """
        self.wait()
        # The frozen weights stay in the copy.
        is_copied = self._source.has_adapter and self._copy.is_filled
        self._copy.update(self._source.tensors(version, adapter_alone=is_copied))
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

        def send() -> SyncReport | None:
            # On the stream that trains, each of the sync's kernels and copies would wait for those of the step.
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                report = self._send_until_done(version, self._copied_tensors)
            when_done()
            return report or self.report_of(version)

        self._pending = self._thread.submit(send)

    def wait(self) -> None:
        """Wait for the sync that `begin` started, which has its own deadlines.

        Raises the error of that sync.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        while not pending.done():
            self._fleet.on_wait()
            wait([pending], timeout=WAIT_SLICE_S)
        self._report = pending.result()

    def report_of(self, version: int) -> SyncReport | None:
        """Return the report of the newest sync, if it was one of this version."""
        return self._newest_report if self._newest == version else None

    def pop_report(self) -> SyncReport | None:
        """Return the report of the last sync that `begin` started, once."""
        report, self._report = self._report, None
        return report

    def failed(self, member: Member) -> None:
        """Record that a server's sync, or the check after it, failed.

        The server pauses, and gets no requests until its next sync.
        """
        num_failures = self._failures.get(member, (0, 0.0))[0] + 1
        pause_s = min(LEAST_PAUSE_S * 2 ** (num_failures - 1), MOST_PAUSE_S)
        self._failures[member] = (num_failures, time.monotonic() + pause_s)
        self._fleet.drop(member)
        self._done.pop(member, None)
        if not self._closing.is_set():
            try:
                self._fleet.loop.call(member.link.greet_again(), CALL_TIMEOUT_S)
            except SlipstreamError as error:
                log.warning("the server at %s could not be greeted again: %s", member.endpoint, error)

    def close(self) -> None:
        """Abort the sync in progress and close all sessions."""
        self._closing.set()
        if (attempt := self._attempt) is not None:
            attempt.end(SHUTTING_DOWN)
        self._thread.shutdown()
        self._sessions.close_all()

    def _copied_tensors(self, *, adapter_alone: bool) -> NamedTensors:
        tensors = self._copy.tensors()
        return self._source.of_adapter(tensors) if adapter_alone else tensors

    def _forget_gone(self) -> None:
        for member in [member for member in self._done.keys() | self._failures.keys() if member.is_gone]:
            self._done.pop(member, None)
            self._failures.pop(member, None)

    def _send_until_done(
        self, version: int, tensors: Tensors, members: list[Member] | None = None
    ) -> SyncReport | None:
        self._forget_gone()
        reason, attempt = "", 1
        while attempt <= self._config.max_attempts:
            if not (connected := self._fleet.wait(self._closing)):
                return None
            due = self._due(version, members, connected)
            outcome = self._round(version, tensors, due)
            for member, error in outcome.failures.items():
                self._handle_failure(
                    member, error, version, f"{outcome.stages.get(member, 'pausing')} (attempt {attempt})"
                )
                reason = str(error)  # only the text: the traceback would keep the session's sockets open
            if outcome.reports:
                return self._summary(version, outcome)
            if self.holders(version if members is None else None):
                return None
            attempt += not outcome.failures or any(not member.is_draining for member in outcome.failures)
        raise PushError(
            f"the weight sync of version {version} failed in {self._config.max_attempts} attempts "
            f"(learner.weight_sync.max_attempts); the last error: {reason}"
        )

    def _due(self, version: int, members: list[Member] | None, connected: list[Member]) -> list[Member]:
        """Return the servers of the next round.

        These are the requested servers that are still there, or all with older weights of this run. While no
        server has weights of this run and none of these is left, all connected servers are due.
        """
        holders, up_to_date = self.holders(), self.holders(version)
        wanted = [member for member in holders if member not in up_to_date] if members is None else members
        due = [member for member in wanted if member in connected]
        return due or ([] if holders else [member for member in connected if self._fits(member)])

    def _fits(self, member: Member) -> bool:
        """Return whether a server that connected during a sync fits the run; exclude it if not."""
        try:
            self._check(member)
        except ServerLost:
            return True  # the attempt notices that, and retries
        except (ConfigError, DataError) as error:
            self._fleet.exclude(member, error)
            return False
        return True

    def _round(self, version: int, tensors: Tensors, members: list[Member]) -> Round:
        """Sync these servers: each gets the version or fails. One that was interrupted goes on in a new session."""
        manifest = self._source.manifest(members)
        groups, unfit = self._sessions.groups(members, manifest)
        outcome = Round(failures=unfit)
        for group in groups:
            left = group
            while left:
                self._attempt_at(left, version, tensors, manifest, outcome)
                left = [member for member in left if member not in outcome.reports | outcome.failures]
        return outcome

    def _attempt_at(
        self, group: list[Member], version: int, tensors: Tensors, manifest: Manifest, outcome: Round
    ) -> None:
        """Make one attempt at servers that share a session. At least one of them succeeds or fails."""
        lost = [member for member in group if member.welcome is None]
        if lost:
            outcome.failures |= {member: PushError(f"the server at {member.endpoint} went away") for member in lost}
            return
        try:
            session = self._sessions.of(group, manifest)
        except (PushError, ConfigError) as error:
            outcome.failures |= dict.fromkeys(group, error)
            return
        attempt = self._attempt = SyncAttempt(
            session, version, self._fleet.loop, self._config,
            others_serve=any(member not in group for member in self.holders()), on_wait=self._fleet.on_wait,
        )  # fmt: skip
        if self._closing.is_set():
            attempt.end(SHUTTING_DOWN)
        reports: dict[Member, SyncReport] = {}
        try:
            reports, failures = attempt.run(tensors(adapter_alone=session.carries.is_adapter_alone))
        finally:
            self._attempt = None
            for member in group:
                self._done.pop(member, None)
            if len(reports) < len(group):
                self._sessions.close(session)
        self._done |= {member: (session.server_ids[member], version) for member in reports}
        outcome.reports |= reports
        outcome.failures |= failures
        outcome.stages |= dict.fromkeys(failures, attempt.stage)
        outcome.num_bytes += max((report.num_bytes for report in reports.values()), default=0)

    def _handle_failure(self, member: Member, error: Failure, version: int, where: str) -> None:
        """Handle a failed sync. Raises its error if the run cannot go on."""
        if isinstance(error, PushIncomplete | ConfigError):  # a retry would fail too
            self._fleet.exclude(member, error)
            return
        if self._closing.is_set():
            raise error
        if member.is_draining:
            log.info(
                "skipped the weight sync of version %d to the server at %s (shutting down)", version, member.endpoint
            )
            return
        to = f" to {member.endpoint}" if self._fleet.is_several else ""
        log.warning("weight sync of version %d%s failed while %s: %s", version, to, where, error)
        self.failed(member)

    def _summary(self, version: int, outcome: Round) -> SyncReport:
        """Return the maximum of each duration, and the bytes that left the learner."""
        self._newest = version
        for member in outcome.reports:
            self._failures.pop(member, None)
        each = list(outcome.reports.values())
        if self._fleet.is_several:
            durations = ", ".join(
                f"{member.endpoint} in {report.total_s:.2f} s ({report.stall_s:.2f} s stalled)"
                for member, report in outcome.reports.items()
            )
            log.info("synced version %d to %s", version, durations)
        self._newest_report = SyncReport(
            total_s=max(report.total_s for report in each),
            transfer_s=max(report.transfer_s for report in each),
            load_s=max(report.load_s for report in each),
            stall_s=max(report.stall_s for report in each),
            num_bytes=outcome.num_bytes,
            pause_s=max(report.pause_s for report in each),
        )
        return self._newest_report
