"""The learner's half of a weight push (the server's is inference_server/push.py, the bytes are protocol/weights.py).

    PushBegin ─▶ PushReady ─▶ buckets over the collective ─▶ PushDone(checksum) ─▶ verified

Every arrow has the deadline `learner.push.timeout_s`. After any failure the epoch is given up on both sides and the next
attempt starts a new one: new collective, manifest sent again, all weights sent again.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable

import msgspec
import torch

from learner.config import PushConfig
from learner.rollouts import Rollouts
from protocol.collective import Collective, Meeting, address_towards
from protocol.errors import DeadlineExceeded, PushFailed
from protocol.messages import Manifest, PushBegin, PushDone, Rendezvous
from protocol.weights import make_manifest, send_weights

log = logging.getLogger(__name__)

CALL_SLACK_S = 10.0
"""The event loop keeps the deadlines; a call into it waits this much longer, in case the loop itself is stuck."""


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one push cost, in seconds."""

    total_s: float
    transfer_s: float
    load_s: float
    stall_s: float


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """One incarnation of the weight-transfer group: valid for one server process."""

    name: str
    server_id: str
    rendezvous: Rendezvous
    manifest: Manifest


class Pusher:
    """Pushes the policy's weights over one link. `tensors` gives (checkpoint name, tensor) layer by layer."""

    def __init__(
        self,
        rollouts: Rollouts,
        tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        wire_dtype: torch.dtype,
        config: PushConfig,
        connect_timeout_s: float,
    ) -> None:
        self._rollouts, self._link, self._loop = rollouts, rollouts.link, rollouts.thread
        self._tensors, self._wire_dtype, self._config = tensors, wire_dtype, config
        self._connect_timeout_s = connect_timeout_s
        self._meeting: Meeting | None = None
        self._epoch: Epoch | None = None
        self._collective: Collective | None = None

    @property
    def server_id(self) -> str | None:
        """The server that got the last push."""
        return self._epoch.server_id if self._epoch else None

    @property
    def server_has_weights(self) -> bool:
        """Whether the server now connected is the one that got the last push."""
        welcome = self._link.welcome
        return self._epoch is not None and welcome is not None and welcome.server_id == self._epoch.server_id

    def push(self, version: int) -> PushReport:
        """Send the current weights as `version`. Raises PushFailed after `max_attempts` failures."""
        for attempt in range(1, self._config.max_attempts + 1):
            self._rollouts.wait_for_server(self._connect_timeout_s)
            try:
                return self._push_once(version)
            except (PushFailed, DeadlineExceeded) as error:
                self._abandon_epoch()
                log.warning("push of version %d failed (attempt %d): %s", version, attempt, error)
                failure = error
        raise PushFailed(
            f"version {version} could not be pushed in {self._config.max_attempts} attempts (learner.push.max_attempts); "
            f"the last failure: {failure}"
        ) from failure

    def close(self) -> None:
        self._abandon_epoch()

    def _push_once(self, version: int) -> PushReport:
        started = time.monotonic()
        is_new_epoch = not self.server_has_weights
        if is_new_epoch:
            self._abandon_epoch()
            self._epoch = self._new_epoch()
        epoch = self._epoch
        assert epoch is not None
        begin = PushBegin(
            epoch=epoch.name,
            version=version,
            rendezvous=epoch.rendezvous if is_new_epoch else None,
            manifest=epoch.manifest if is_new_epoch else None,
        )
        timeout_s = self._config.timeout_s
        self._loop.call(self._link.begin_push(begin, timeout_s), timeout_s + CALL_SLACK_S)
        ready = time.monotonic()
        checksum = self._send(epoch, is_new_epoch)
        sent = time.monotonic()
        done = self._loop.call(self._link.finish_push(epoch.name, version, timeout_s), timeout_s + CALL_SLACK_S)
        self._verify(done, checksum)
        return PushReport(
            total_s=time.monotonic() - started, transfer_s=sent - ready, load_s=done.load_s, stall_s=done.stall_s
        )

    def _send(self, epoch: Epoch, is_new_epoch: bool) -> str:
        assert self._meeting is not None
        if is_new_epoch:
            self._collective = self._meeting.host_collective(epoch.name, epoch.rendezvous, torch.device("cpu"))
        assert self._collective is not None
        return send_weights(self._collective, epoch.manifest, self._tensors())

    def _verify(self, done: PushDone, checksum: str) -> None:
        if done.checksum != checksum:
            raise PushFailed(f"version {done.version} arrived with checksum {done.checksum}, sent was {checksum}")

    def _new_epoch(self) -> Epoch:
        welcome = self._link.welcome
        if welcome is None:
            raise PushFailed(f"no server is connected at {self._link.endpoint}")
        if self._meeting is None:
            self._meeting = Meeting(address_towards(self._link.endpoint), self._config.timeout_s)
        return Epoch(
            name=uuid.uuid4().hex[:8],
            server_id=welcome.server_id,
            rendezvous=self._meeting.rendezvous(welcome.num_workers, "gloo"),
            manifest=make_manifest(self._tensors(), self._wire_dtype, self._config.bucket_mib << 20),
        )

    def _abandon_epoch(self) -> None:
        if self._collective is not None:
            self._collective.close()
            self._collective = None
        if self._epoch is not None and self._link.connected:
            self._loop.call(self._link.abort_push(self._epoch.name), CALL_SLACK_S)
        self._epoch = None
