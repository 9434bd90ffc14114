"""Sync the policy's weights to all servers of the fleet. weight_transfer.py syncs one server.

    new weights ─▶ all servers with older ones of this run      read once, each at its own pace (fan_out.py)
    a server without weights ─▶ a sync of its own               the other servers continue to generate

A sync has succeeded when one server has the weights. Much slower servers count as failed (`Stragglers`). A
failed server gets no requests until a later sync, which starts automatically after a pause. While no server
has the weights, the sync is retried at once, `learner.weight_sync.max_attempts` times. With
`learner.weight_sync.overlap_with_training`, a sync sends a copy of the weights from its own thread, one sync
at a time. sync_source.py decides what a sync sends.
Invariant: while no server has weights of this run, none is dropped as a straggler. Only
`learner.weight_sync.timeout_s` limits a sync then.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from learner.config import WeightSyncConfig
from learner.servers.fan_out import FanOut, Share
from learner.servers.fleet import Fleet
from learner.servers.membership import Member
from learner.servers.sync_source import SyncSource, Weights
from learner.servers.weight_transfer import PushReport, ServerPush, WeightCopy
from protocol.errors import ConfigError, DeadlineExceeded, PushError, PushIncomplete
from protocol.weights.buckets import NamedTensors

log = logging.getLogger(__name__)
WAIT_SLICE_S = 0.5
LEAST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0
"""Bounds of the pause after a failed sync. Each consecutive failure doubles the pause."""
Tensors = Callable[..., NamedTensors]
"""Source of a sync. With `adapter_alone`: only of the tensors that a later sync of a session carries."""
Failure = PushError | DeadlineExceeded | ConfigError


class Stragglers:
    """Straggler detection in one round of syncs, used by the waiting thread."""

    def __init__(
        self, patience_s: float, have_it: Collection[Member], have_failed: Collection[Member], *, others_serve: bool
    ) -> None:
        """Start the clock of a round.

        Args:
            have_it: Servers that have the version, updated during the round.
            have_failed: Servers whose sync failed, updated during the round.
            others_serve: Whether servers outside this round have weights of this run.
        """
        self._patience_s = patience_s
        self._have_it, self._have_failed, self._others_serve = have_it, have_failed, others_serve
        self._began_at = time.monotonic()
        self._first_at: float | None = None
        """Time when a server of this round was first seen to have the version."""

    def end_late(self, pushes: Mapping[Member, tuple[ServerPush, Share]]) -> None:
        """End the syncs of all stragglers.

        Repeats the reason at every call, because a sync may have started to wait for something else.
        """
        if self._have_it and self._first_at is None:
            self._first_at = time.monotonic()
        for member, (push, share) in pushes.items():
            has_ended = member in self._have_it or member in self._have_failed
            if not has_ended and (reason := self._why_late(push, share)):
                share.cut_off(reason)
                push.end(reason)

    def _why_late(self, push: ServerPush, share: Share) -> str | None:
        now = time.monotonic()
        if share.failure is not None:
            return share.failure
        if self._first_at is not None and now - self._first_at > self._patience_s:
            return (
                f"another server had the version {self._patience_s:g} s earlier "
                "(learner.weight_sync.straggler_timeout_s); this server gets its own weight sync"
            )
        moved_at = max(self._began_at, push.moved_at, share.moved_at)
        if self._others_serve and now - moved_at > self._patience_s:
            return (
                f"it has made no progress for {self._patience_s:g} s (learner.weight_sync.straggler_timeout_s), and "
                "the other servers do not wait; it gets another weight sync"
            )
        return None


class WeightSync:
    """Weight sync to the servers of one fleet."""

    def __init__(self, fleet: Fleet, weights: Weights, config: WeightSyncConfig) -> None:
        self._fleet, self._weights, self._config = fleet, weights, config
        self._pushes: dict[Member, ServerPush] = {}
        self._failures: dict[Member, tuple[int, float]] = {}
        """Number of consecutive failures of a server, and the end of its pause."""
        self.reports: dict[Member, PushReport] = {}
        """Reports of the last sync, by server."""
        self._newest: int | None = None
        """Last version that a server received."""
        self._source = SyncSource(weights, config)
        self.sample = self._source.sample
        self._copy = WeightCopy(weights.wire_dtype, weights.copy_device)
        self._thread = ThreadPoolExecutor(1, "push")
        self._pending: Future[PushReport | None] | None = None
        self._report: PushReport | None = None
        """Report of the last sync that `begin` started, until it is taken."""
        self._closing = threading.Event()

    @property
    def is_pushing(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def holders(self, version: int | None = None) -> list[Member]:
        """Return the servers that have this version, or any version of this run."""
        versions = {member: self._push_of(member).version for member in self._fleet.connected()}
        return [member for member, held in versions.items() if held is not None and version in (None, held)]

    def joiners(self) -> list[Member]:
        """Return the servers without the newest weights that are due for their own sync."""
        holders, now = self.holders(self._newest) if self._newest is not None else [], time.monotonic()
        without = [member for member in self._fleet.connected() if member not in holders]
        return [member for member in without if not holders or self._failures.get(member, (0, 0.0))[1] <= now]

    def push(self, version: int, members: list[Member] | None = None) -> PushReport | None:
        """Send the current weights as `version` to these servers.

        By default the servers are all that have older weights. Returns None if no sync succeeded but other
        servers have the weights.

        Raises:
            PushError: `max_attempts` attempts failed, and no server has the weights.
            PushIncomplete: The last server cannot take the weights.
        """
        self.wait()
        return self._push_until_done(version, partial(self._source.tensors, version), members)

    def begin(self, version: int, when_done: Callable[[], object]) -> None:
        """Copy the weights and sync the copy in a thread, which then calls `when_done`.

        Raises the error of the previous sync.
        """
        self.wait()
        # The frozen weights stay in the copy.
        is_copied = self._source.has_adapter and self._copy.is_filled
        self._copy.update(self._source.tensors(version, adapter_alone=is_copied))

        def push() -> PushReport | None:
            report = self._push_until_done(version, self._copied_tensors)
            when_done()
            return report

        self._pending = self._thread.submit(push)

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

    def pop_report(self) -> PushReport | None:
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
        self._push_of(member).give_up(greet_again=not self._closing.is_set())

    def close(self) -> None:
        """Abort all syncs in progress and close all sessions."""
        self._closing.set()
        for push in self._pushes.values():
            push.end("the learner is shutting down")
        self._thread.shutdown()
        for push in self._pushes.values():
            push.close()

    def _push_of(self, member: Member) -> ServerPush:
        if member not in self._pushes:
            self._pushes[member] = ServerPush(member, self._fleet.loop, self._config, self._weights.device)
        return self._pushes[member]

    def _copied_tensors(self, *, adapter_alone: bool) -> NamedTensors:
        tensors = self._copy.tensors()
        return self._source.of_adapter(tensors) if adapter_alone else tensors

    def _forget_gone(self) -> None:
        for member in [member for member in self._pushes if member.is_gone]:
            self._pushes.pop(member).close()
            self._failures.pop(member, None)

    def _push_until_done(
        self, version: int, tensors: Tensors, members: list[Member] | None = None
    ) -> PushReport | None:
        self._forget_gone()
        reason, attempt = "", 1
        while attempt <= self._config.max_attempts:
            due = self._due(version, members)
            reports, failures = self._round(version, tensors, due)
            for member, error in failures.items():
                self._note(member, error, version, attempt)
                reason = str(error)  # only the text: the traceback would keep the session's sockets open
            if reports:
                return self._summary(version, reports)
            if self.holders(version if members is None else None):
                return None
            attempt += not failures or any(not member.is_draining for member in failures)
        raise PushError(
            f"the weight sync of version {version} failed in {self._config.max_attempts} attempts "
            f"(learner.weight_sync.max_attempts); the last error: {reason}"
        )

    def _due(self, version: int, members: list[Member] | None) -> list[Member]:
        """Return the servers of the next round.

        These are the requested servers that are still there, or all with older weights of this run. While no
        server has weights of this run and none of these is left, all connected servers are due.
        """
        connected = self._fleet.wait(self._closing)
        holders, up_to_date = self.holders(), self.holders(version)
        wanted = [member for member in holders if member not in up_to_date] if members is None else members
        return [member for member in wanted if member in connected] or ([] if holders else connected)

    def _round(
        self, version: int, tensors: Tensors, members: list[Member]
    ) -> tuple[dict[Member, PushReport], dict[Member, Failure]]:
        """Make one attempt at each of these servers."""
        manifest = self._source.manifest(members)
        adapter_alone = self._source.has_adapter and all(self._push_of(member).is_in_session for member in members)
        source = partial(tensors, adapter_alone=adapter_alone)
        reports: dict[Member, PushReport] = {}
        failures: dict[Member, Failure] = {}

        def push(member: Member, tensors: NamedTensors) -> None:
            try:
                reports[member] = self._push_of(member).push(version, manifest, tensors, adapter_alone=adapter_alone)
            except (PushError, DeadlineExceeded, ConfigError) as error:
                failures[member] = error
            finally:
                if isinstance(tensors, Share):
                    tensors.close()

        others_serve = any(member not in members for member in self.holders())
        if len(members) == 1 and not others_serve:
            push(members[0], source())
        elif members:
            stragglers = Stragglers(
                self._config.straggler_timeout_in_effect_s, reports, failures, others_serve=others_serve
            )
            self._read_once(source, members, push, stragglers)
        return reports, failures

    def _read_once(
        self,
        source: partial[NamedTensors],
        members: list[Member],
        push: Callable[[Member, NamedTensors], None],
        stragglers: Stragglers,
    ) -> None:
        def poll() -> None:
            self._fleet.on_wait()
            stragglers.end_late(under_way)

        is_copied = source.func == self._copied_tensors  # the copy is in memory anyway
        window_bytes = math.inf if is_copied else float(self._config.bucket_mib << 20)
        config = self._config
        fan_out = FanOut(len(members), window_bytes, config.timeout_s, config.straggler_timeout_in_effect_s, poll)
        shares = dict(zip(members, fan_out.shares, strict=True))
        under_way = {member: (self._push_of(member), share) for member, share in shares.items()}
        with ThreadPoolExecutor(len(members), "push-server") as threads:
            pushing = [threads.submit(push, member, share) for member, share in shares.items()]
            try:
                fan_out.read(source())
            except BaseException:
                for straggler, _ in under_way.values():
                    straggler.end("the policy could not be read")
                raise
            while not all(future.done() for future in pushing):
                poll()
                wait(pushing, timeout=WAIT_SLICE_S)
        for future in pushing:
            future.result()

    def _note(self, member: Member, error: Failure, version: int, attempt: int) -> None:
        """Handle a failed sync. Raises its error if the run cannot go on."""
        push = self._push_of(member)
        if isinstance(error, PushIncomplete | ConfigError):  # a retry would fail too
            push.give_up(greet_again=False)
            self._fleet.exclude(member, error)
            return
        if self._closing.is_set():
            push.give_up(greet_again=False)
            raise error
        if member.is_draining:
            log.info(
                "skipped the weight sync of version %d to the server at %s (shutting down)", version, member.endpoint
            )
            push.give_up(greet_again=False)
            return
        to = f" to {member.endpoint}" if self._fleet.is_several else ""
        log.warning(
            "weight sync of version %d%s failed while %s (attempt %d): %s", version, to, push.state, attempt, error
        )
        self.failed(member)

    def _summary(self, version: int, reports: dict[Member, PushReport]) -> PushReport:
        """Return the maximum of each duration, and the sum of all bytes."""
        self._newest, self.reports = version, reports
        for member in reports:
            self._failures.pop(member, None)
        each = list(reports.values())
        if self._fleet.is_several:
            durations = ", ".join(
                f"{member.endpoint} in {report.total_s:.2f} s ({report.stall_s:.2f} s stalled)"
                for member, report in reports.items()
            )
            log.info("synced version %d to %s", version, durations)
        return PushReport(
            total_s=max(report.total_s for report in each),
            transfer_s=max(report.transfer_s for report in each),
            load_s=max(report.load_s for report in each),
            stall_s=max(report.stall_s for report in each),
            num_bytes=sum(report.num_bytes for report in each),
            pause_s=max(report.pause_s for report in each),
        )
