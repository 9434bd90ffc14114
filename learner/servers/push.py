"""The learner's half of a weight push (the server's is inference_server/push.py, the bytes are protocol/weights/).

    PushBegin ─▶ PushReady ─▶ buckets over the collective ─▶ PushDone(checksum) ─▶ compared

Every arrow has the deadline `learner.push.timeout_s`. After any failure the epoch is given up on both sides and the next
attempt starts a new one: new collective, manifest sent again, all weights sent again. While bytes travel, word from the
server that it has failed, or its silence, ends the transfer at once.

With `learner.push.overlap` a push works on a copy of the weights in a thread of its own; at most one is under way.
"""

import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, Literal, Protocol

import msgspec
import torch
from tqdm import tqdm

from learner.config import PushConfig
from learner.progress import PROGRESS_EVERY_S
from learner.servers.connection import Connection
from learner.servers.epoch import Epoch, Epochs
from protocol.collective.group import Collective
from protocol.errors import DeadlineExceeded, PushError, PushIncomplete, SlipstreamError
from protocol.messages import PushBegin, PushDone
from protocol.weights.buckets import NamedTensors, dtype_on_wire
from protocol.weights.dense import Sent

log = logging.getLogger(__name__)

CALL_SLACK_S = 10.0
"""The event loop keeps the deadlines; a call into it waits this much longer, in case the loop itself is stuck."""
WAIT_SLICE_S = 0.5
PushState = Literal["pausing", "joining", "sending", "finishing"]
"""What the learner waits for: the server's PushReady, its workers, the transfer, PushDone."""
PROGRESS_BYTES = 1 << 30
"""A push of more shows a progress bar."""


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one push cost, in seconds, and how many bytes it sent."""

    total_s: float
    transfer_s: float
    load_s: float
    stall_s: float
    num_bytes: int

    def metrics(self) -> dict[str, float]:
        return {
            "push/seconds": self.total_s,
            "push/transfer_seconds": self.transfer_s,
            "push/load_seconds": self.load_s,
            "push/stall_seconds": self.stall_s,
            "push/bytes": self.num_bytes,
        }


class Weights(Protocol):
    """What a push sends: policy/published.py, or whatever gives weights by name."""

    wire_dtype: torch.dtype
    device: torch.device
    copy_device: torch.device | None
    """Where `begin` keeps its copy of them; None: where they lie."""

    def tensors(self) -> NamedTensors:
        """Yield (checkpoint name, tensor) layer by layer."""
        ...


class Pusher:
    """Pushes weights over one connection."""

    def __init__(self, connection: Connection, weights: Weights, config: PushConfig) -> None:
        self._connection, self._weights, self._config = connection, weights, config
        self._link, self._loop = connection.link, connection.loop
        self._epochs = Epochs(self._link, weights.wire_dtype, config, weights.device)
        self._epoch: Epoch | None = None
        self._copy = WeightCopy(weights.wire_dtype, weights.copy_device)
        self._thread = ThreadPoolExecutor(1, "push")
        self._pending: Future[PushReport] | None = None
        self._closing = threading.Event()
        self._state: PushState = "pausing"
        """Of the push that is under way, or was."""
        self.server_id: str | None = None
        """The server that got the last push."""

    @property
    def server_has_weights(self) -> bool:
        """Whether the server now connected is the one that got the last push."""
        welcome = self._link.welcome
        return welcome is not None and welcome.server_id == self.server_id

    @property
    def is_pushing(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def push(self, version: int) -> PushReport:
        """Send the current weights as `version`. Raises PushError after `max_attempts` failures, PushIncomplete."""
        self.wait()
        return self._push_until_done(version, self._weights.tensors)

    def begin(self, version: int, when_done: Callable[[], object]) -> None:
        """Copy the weights and push the copy from a thread, which then calls `when_done`.

        Raises what a push before has failed with.
        """
        self.wait()
        self._copy.take(self._weights.tensors())

        def push() -> PushReport:
            report = self._push_until_done(version, self._copy.tensors)
            when_done()
            return report

        self._pending = self._thread.submit(push)

    def wait(self) -> PushReport | None:
        """Wait for the push that was begun, which keeps deadlines of its own. Raises what it has failed with."""
        pending, self._pending = self._pending, None
        while pending is not None and not pending.done():
            self._connection.on_wait()
            wait([pending], timeout=WAIT_SLICE_S)
        return pending.result() if pending is not None else None

    def close(self) -> None:
        """Give up whatever is under way."""
        self._closing.set()
        if self._epoch is not None:
            self._epoch.abort()
        self._thread.shutdown()
        self._abandon_epoch()
        self._epochs.close()

    def _push_until_done(self, version: int, tensors: Callable[[], NamedTensors]) -> PushReport:
        for attempt in range(1, self._config.max_attempts + 1):
            self._connection.wait(self._closing)
            try:
                return self._push_once(version, tensors)
            except PushIncomplete:
                self._abandon_epoch()
                raise
            except (PushError, DeadlineExceeded) as error:
                if not self._closing.is_set():
                    log.warning(
                        "push of version %d failed while %s (attempt %d): %s", version, self._state, attempt, error
                    )
                self._abandon_epoch()
                if self._closing.is_set():
                    raise
                self._tell(self._link.greet_again())
                reason = str(error)  # only its words: its traceback would keep the sockets of the epoch open
        raise PushError(
            f"version {version} could not be pushed in {self._config.max_attempts} attempts (learner.push.max_attempts); "
            f"the last failure: {reason}"
        )

    def _push_once(self, version: int, tensors: Callable[[], NamedTensors]) -> PushReport:
        started = time.monotonic()
        if not self.server_has_weights or self._epoch is None:
            self._abandon_epoch()
            self._epoch = self._epochs.begin(tensors)
        epoch, timeout_s = self._epoch, self._config.timeout_s
        is_new = epoch.collective is None
        begin = PushBegin(
            epoch=epoch.name,
            version=version,
            rendezvous=epoch.rendezvous if is_new else None,
            manifest=epoch.manifest if is_new else None,
        )
        self._state = "pausing"
        self._loop.call(self._link.begin_push(begin, timeout_s), timeout_s + CALL_SLACK_S)
        ready = time.monotonic()
        done = self._loop.submit(self._link.finish_push(epoch.name))
        try:
            sent = self._send(epoch, version, tensors(), done)
            travelled = time.monotonic()
            self._state = "finishing"
            report = self._result(done, begin, sent)
        finally:
            done.cancel()
        if report.checksum != sent.checksum:
            raise PushError(f"version {version} arrived as {report.checksum}, sent was {sent.checksum}")
        self.server_id = epoch.server_id
        return PushReport(
            total_s=time.monotonic() - started, transfer_s=travelled - ready, load_s=report.load_s,
            stall_s=report.stall_s, num_bytes=sent.num_bytes,
        )  # fmt: skip

    def _send(self, epoch: Epoch, version: int, tensors: NamedTensors, done: Future[PushDone]) -> Sent:
        """Join the epoch if need be and send; a `done` that fails meanwhile is why."""
        if epoch.collective is None:
            self._state = "joining"
            epoch.collective = self._join(epoch, done)
        self._state = "sending"
        done.add_done_callback(lambda ended: epoch.abort() if ended.cancelled() or ended.exception() else None)
        num_bytes = epoch.num_bytes
        try:
            with tqdm(
                total=num_bytes, unit="B", unit_scale=True, desc=f"push {version}", mininterval=PROGRESS_EVERY_S,
                disable=num_bytes < PROGRESS_BYTES,
            ) as bar:  # fmt: skip
                return epoch.send(tensors, bar.update)
        except PushError as effect:
            cause = done.exception() if done.done() and not done.cancelled() else None
            if isinstance(cause, PushIncomplete):
                raise cause from effect
            if cause is not None:
                raise PushError(f"{cause}; the transfer ended in {effect}") from cause
            raise

    def _join(self, epoch: Epoch, done: Future[PushDone]) -> Collective:
        """Wait for every worker, but no longer than the server has not failed."""
        with ThreadPoolExecutor(1, "push-join") as thread:
            joining = thread.submit(epoch.join)
            either: list[Future[Any]] = [joining, done]
            wait(either, return_when="FIRST_COMPLETED")
            if not joining.done():
                epoch.abort()
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
                f"no PushDone for version {begin.version} in epoch {begin.epoch} from {self._link.endpoint} within "
                f"{timeout_s:g} s after the last of {sent.num_bytes} bytes (learner.push.timeout_s)"
            ) from error

    def _abandon_epoch(self) -> None:
        epoch, self._epoch, self.server_id = self._epoch, None, None
        if epoch is None:
            return
        epoch.close()
        if self._link.connected:
            self._tell(self._link.abort_push(epoch.name))

    def _tell(self, word: Coroutine[Any, Any, None]) -> None:
        try:
            self._loop.call(word, CALL_SLACK_S)
        except SlipstreamError as error:
            log.warning("the push could not be given up in order: %s", error)


class WeightCopy:
    """A copy of the weights as they must travel, so that a push may go on while the next step changes the originals.

    Keeps its memory from copy to copy: fresh pages would cost more than the copying. `take` is only called while no push
    reads the copy.
    """

    def __init__(self, wire_dtype: torch.dtype, device: torch.device | None) -> None:
        """`device`: where the copy is kept; None: where each tensor lies."""
        self._wire_dtype, self._device = wire_dtype, device
        self._tensors: dict[str, torch.Tensor] = {}

    def take(self, tensors: NamedTensors) -> None:
        """Copy all tensors, in the wire's dtype."""
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

    def tensors(self) -> NamedTensors:
        return self._tensors.items()
