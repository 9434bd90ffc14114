"""The learner's side of a weight sync with one server. weight_sync.py decides when, and with which servers.

    PushBegin ─▶ PushReady ─▶ buckets over the collective ─▶ PushDone(checksum) ─▶ compared

The server's side is inference_server/weight_update.py; protocol/weights/ encodes the bytes. Every arrow has
the deadline `learner.weight_sync.timeout_s`. After any failure both sides abandon the session. The next attempt
starts a new one, with a new collective, the manifest and all weights. During a transfer, a failure report
from the server or its silence ends the transfer at once.
"""

import logging
import time
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, Literal

import msgspec
import torch
from tqdm import tqdm

from learner.config import WeightSyncConfig
from learner.servers.loop_thread import LoopThread
from learner.servers.membership import Member
from learner.servers.sync_session import SyncSession, SyncSessions
from protocol.console import PROGRESS_EVERY_S, output_mode
from protocol.errors import DeadlineExceeded, PushError, PushIncomplete, SlipstreamError
from protocol.messages import Manifest, PushBegin, PushDone
from protocol.transports.collective import Collective
from protocol.weights.buckets import NamedTensors, dtype_on_wire
from protocol.weights.dense import Sent

log = logging.getLogger(__name__)
CALL_SLACK_S = 10.0
"""Extra wait in seconds for the event loop, which keeps the deadlines but may be stuck itself."""
PushState = Literal["pausing", "joining", "sending", "finishing"]
"""Stage of a sync: waiting for PushReady, for the workers, for the transfer, or for PushDone."""
PROGRESS_BYTES = 1 << 30
"""Size above which a sync shows a progress bar."""
SAMPLED_ELEMENTS = 2048
"""Maximum number of elements sampled per tensor.

These are half a million in a model of 135M parameters, enough to measure a change of 1e-4.
"""


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
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


class ServerPush:
    """Weight sync with one server, one session after the other."""

    def __init__(self, member: Member, loop: LoopThread, config: WeightSyncConfig, device: torch.device) -> None:
        self.member, self._link, self._loop, self._config = member, member.link, loop, config
        self._sessions = SyncSessions(self._link, config, device)
        self._session: SyncSession | None = None
        self.state: PushState = "pausing"
        """Stage of the current or last sync."""
        self.moved_at = time.monotonic()
        """Time of the last progress: a new stage, or more bytes."""
        self.done: tuple[str, int] | None = None
        """Server id and version of the last sync, unless it failed."""

    @property
    def version(self) -> int | None:
        """Last version that the connected server received.

        None if no server is connected, or if it has no weights of this run.
        """
        welcome = self.member.welcome
        return self.done[1] if self.done is not None and welcome and welcome.server_id == self.done[0] else None

    @property
    def is_in_session(self) -> bool:
        """Whether the next sync continues a session, so the server has the frozen weights of the run."""
        return self.version is not None and self._session is not None

    def push(
        self, version: int, manifest: Manifest, tensors: NamedTensors, *, adapter_alone: bool = False
    ) -> PushReport:
        """Send the weights as `version`. After an error `give_up` must follow.

        `adapter_alone`: `tensors` are only those of the adapter, as for a server that is in a session.

        Raises:
            PushError: The sync failed.
            DeadlineExceeded: The server or its workers did not answer in time.
        """
        started = time.monotonic()
        if not self.is_in_session:
            if adapter_alone:
                raise PushError("the server has lost the frozen weights; it gets them with its next weight sync")
            self._abandon_session()
            self._session = self._sessions.begin(manifest)
        session, timeout_s = self._session, self._config.timeout_s
        assert session is not None
        is_new = session.collective is None
        begin = PushBegin(
            session=session.name,
            version=version,
            rendezvous=session.rendezvous if is_new else None,
            manifest=session.manifest if is_new else None,
        )
        self._enter("pausing")
        self._loop.call(self._link.begin_push(begin, timeout_s), timeout_s + CALL_SLACK_S)
        ready = time.monotonic()
        done = self._loop.submit(self._link.finish_push(session.name))
        try:
            sent = self._send(session, version, tensors, done)
            transferred = time.monotonic()
            self._enter("finishing")
            report = self._result(done, begin, sent)
        finally:
            done.cancel()
        if report.checksum != sent.checksum:
            raise PushError(
                f"the weights of version {version} arrived with checksum {report.checksum}; expected {sent.checksum}"
            )
        self.done = (session.server_id, version)
        return PushReport(
            total_s=time.monotonic() - started, transfer_s=transferred - ready, load_s=report.load_s,
            stall_s=report.stall_s, num_bytes=sent.num_bytes, pause_s=report.pause_s,
        )  # fmt: skip

    def give_up(self, *, greet_again: bool) -> None:
        """Abandon the session and its record of what the server has.

        With `greet_again`, the server must welcome this run again before the next attempt.
        """
        self._abandon_session()
        if greet_again:
            self._notify(self._link.greet_again())

    def end(self, reason: str) -> None:
        """Make the sync in progress fail with this reason, wherever it waits. Thread-safe."""
        self._loop.call_soon(self._link.end_push, reason)

    def close(self) -> None:
        """Close the session. No sync may be in progress."""
        self._abandon_session()
        self._sessions.close()

    def _enter(self, state: PushState) -> None:
        self.state, self.moved_at = state, time.monotonic()

    def _send(self, session: SyncSession, version: int, tensors: NamedTensors, done: Future[PushDone]) -> Sent:
        """Join the session if needed and send; a failure of `done` is raised as the cause."""
        if session.collective is None:
            self._enter("joining")
            session.collective = self._join(session, done)
        self._enter("sending")
        done.add_done_callback(lambda ended: session.abort() if ended.cancelled() or ended.exception() else None)
        num_bytes = session.num_bytes

        def progress(num_more: int) -> None:
            self.moved_at = time.monotonic()
            bar.update(num_more)

        try:
            with tqdm(
                total=num_bytes, unit="B", unit_scale=True, desc=f"weight sync {version}", mininterval=PROGRESS_EVERY_S,
                disable=num_bytes < PROGRESS_BYTES or not output_mode().has_bars,
            ) as bar:  # fmt: skip
                return session.send(tensors, progress)
        except PushError as effect:
            cause = done.exception() if done.done() and not done.cancelled() else None
            if isinstance(cause, PushIncomplete):
                raise cause from effect
            if cause is not None:
                raise PushError(f"{cause}; the transfer failed: {effect}") from cause
            raise

    def _join(self, session: SyncSession, done: Future[PushDone]) -> Collective:
        """Wait until every worker has joined, or until the server has failed."""
        with ThreadPoolExecutor(1, "push-join") as thread:
            joining = thread.submit(session.join)
            either: list[Future[Any]] = [joining, done]
            wait(either, return_when="FIRST_COMPLETED")
            if not joining.done():
                session.abort()
            try:
                return joining.result()
            except PushError:
                if done.done():
                    done.result()
                raise

    def _result(self, done: Future[PushDone], begin: PushBegin, sent: Sent) -> PushDone:
        timeout_s = self._config.timeout_s
        try:
            return done.result(timeout_s)
        except NotInTime as error:
            raise DeadlineExceeded(
                f"no PushDone for version {begin.version} in session {begin.session} from {self._link.endpoint} within "
                f"{timeout_s:g} s after the last of {sent.num_bytes} bytes (learner.weight_sync.timeout_s)"
            ) from error

    def _abandon_session(self) -> None:
        session, self._session, self.done = self._session, None, None
        if session is None:
            return
        session.close()
        if self._link.connected:
            self._notify(self._link.abort_push(session.name))

    def _notify(self, call: Coroutine[Any, Any, None]) -> None:
        try:
            self._loop.call(call, CALL_SLACK_S)
        except SlipstreamError as error:
            log.warning("could not abort the weight sync cleanly: %s", error)


class WeightCopy:
    """Copy of the weights in wire format, for a sync that overlaps with training.

    The copy reuses its memory, because fresh pages would cost more than the copying. `take` is called only
    while no sync reads the copy.
    """

    def __init__(self, wire_dtype: torch.dtype, device: torch.device | None) -> None:
        """Create an empty copy on `device`; None keeps each tensor on its own device."""
        self._wire_dtype, self._device = wire_dtype, device
        self._tensors: dict[str, torch.Tensor] = {}

    def update(self, tensors: NamedTensors) -> None:
        """Copy all tensors, in the dtype of the wire."""
        for name, tensor in tensors:
            mine = self._tensors.get(name)
            if mine is None:
                mine = torch.empty_like(
                    tensor,
                    dtype=dtype_on_wire(tensor, self._wire_dtype),
                    device=self._device,
                    memory_format=torch.contiguous_format,
                )
                self._tensors[name] = mine
            mine.copy_(tensor.detach())

    @property
    def is_filled(self) -> bool:
        return bool(self._tensors)

    def tensors(self) -> NamedTensors:
        return self._tensors.items()


class WeightSample:
    """Sampled elements of every tensor in the last two versions.

    They show how much of the policy a version changed.
    """

    def __init__(self, wire_dtype: torch.dtype) -> None:
        self._wire_dtype = wire_dtype
        self._versions: dict[int, dict[str, tuple[int, torch.Tensor]]] = {}
        """Stride and sampled elements, by version and tensor."""

    def watch(self, version: int, tensors: NamedTensors) -> NamedTensors:
        """Yield the tensors of a version, and keep a sample of each."""
        sample: dict[str, tuple[int, torch.Tensor]] = {}
        self._versions = {kept: self._versions[kept] for kept in self._versions if kept == version - 1} | {
            version: sample
        }
        for name, tensor in tensors:
            # Odd, so that the samples are not all in one column.
            stride = -(-tensor.numel() // SAMPLED_ELEMENTS) | 1
            elements = tensor.detach().reshape(-1)[::stride]
            sample[name] = (stride, elements.to(dtype_on_wire(tensor, self._wire_dtype), copy=True))
            yield name, tensor

    def changed_frac(self, version: int, dtype: torch.dtype) -> float:
        """Estimate the share of weights that `version` changed; 0 if unknown.

        `dtype`: dtype of the weights on the server.
        """
        before, after = self._versions.get(version - 1, {}), self._versions.get(version, {})
        changed = total = 0
        for name in before.keys() & after.keys():
            stride, elements = after[name]
            changed += stride * int((elements.to(dtype) != before[name][1].to(dtype)).sum())
            total += stride * len(elements)
        return changed / max(total, 1)
