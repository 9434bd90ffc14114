"""Receiver of weight syncs in a worker, also during generation.

    PushOrder ─▶ join the session ─▶ checked buckets ─▶ (a Successor, or kept until complete) ─▶ loaded

This module is independent of vLLM.
Invariant: a bucket is handed out at most once, after its check. After any failure, the session has been left.
"""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import msgspec
import torch

from inference_server.engine.interface import PushOrder
from protocol.errors import PushError, PushIncomplete, PushInterrupted
from protocol.messages import Manifest, Rendezvous
from protocol.transports.collective import Collective
from protocol.transports.group import join_collective, watched
from protocol.weights.buckets import BucketMemory, checksum_of
from protocol.weights.delta import Baseline, receive_changes
from protocol.weights.dense import ReceivedBucket, receive_weights
from protocol.weights.pinned import empty_in_host_memory

LEAVE_TIMEOUT_S = 10.0
"""Maximum seconds for a thread to end after its collective was aborted."""
NewBaseline = Callable[[str, Manifest], Baseline]
"""Creates the baseline onto which the deltas of a session are decoded, from its id and its manifest."""


class Successor(Protocol):
    """Weights of a staged sync, prepared while the current weights are served."""

    load_s: float
    """Seconds that loading took, without waits for buckets."""
    adapter: dict[str, torch.Tensor]
    """Tensors of the adapter, received with the weights."""

    def receive(self, arriving: Iterator[ReceivedBucket]) -> None:
        """Load all buckets as they arrive, in the receiving thread."""
        ...

    def swap_in(self) -> None:
        """Replace the weights that are served."""
        ...


class SessionMembership(msgspec.Struct, frozen=True, eq=False):
    """Membership of one rank in one session."""

    session: str
    rank: int
    rendezvous: Rendezvous
    collective: Collective
    manifest: Manifest
    """Tensors of the next sync, or of the current one."""
    baseline: Baseline | None
    memory: BucketMemory
    kept: dict[int, torch.Tensor] = msgspec.field(default_factory=dict)
    """Pinned buffers of a server with a GPU for the buckets of a staged sync, which the next sync uses again."""


class Receiver:
    """Receiver of one worker. `leave` ends any running operation."""

    def __init__(self, number: int, device: torch.device, new_baseline: NewBaseline = lambda *_: Baseline()) -> None:
        """Create the receiver of the server's worker with this number, from 0."""
        self._number, self._device, self._new_baseline = number, device, new_baseline
        self._member: SessionMembership | None = None
        self._version = 0
        """Version of the sync that is received."""
        self._staging: _Staging | None = None
        self._lock = threading.Lock()
        """Held while the membership changes: an abandoned join must not take effect."""
        self.join_s = self.receive_s = 0.0
        """Seconds that the last sync took to join and to receive."""
        self.checksum = ""
        """Checksum of the bytes of the last complete sync."""

    def stage(self, order: PushOrder, successor: Successor | None = None) -> None:
        """Start to join and receive in a thread.

        Without a successor, all buckets are kept until `buckets` takes them.
        """
        self._drop_staging()
        self._staging = _Staging(self, order, successor)
        self._staging.start()

    @property
    def is_staging(self) -> bool:
        return self._staging is not None and self._staging.is_alive()

    @property
    def failure(self) -> PushError | None:
        """Failure of the staged sync, or None."""
        return self._staging.failure if self._staging is not None else None

    def successor(self, order: PushOrder) -> Successor | None:
        """Return the successor of a sync, or None if the sync was not staged with one.

        Raises:
            PushError: Receiving has failed.
        """
        staging = self._staging
        if staging is None or staging.successor is None or not staging.is_for(order):
            return None
        self._staging = None
        staging.finish()
        return staging.successor

    def carried_by(self, order: PushOrder) -> Manifest | None:
        """Return what a sync carries, or None if its session is unknown."""
        if order.manifest is not None:
            return order.manifest
        member = self._member
        return None if member is None or member.session != order.session else member.manifest.of_later_syncs()

    def buckets(self, order: PushOrder) -> Iterator[ReceivedBucket]:
        """Yield the buckets of a sync, from memory if staged, otherwise as they arrive.

        Raises:
            PushError: Joining or receiving has failed.
        """
        staging, self._staging = self._staging, None
        if staging is not None and staging.is_for(order):
            yield from staging.take()
        else:
            self.join(order)
            yield from self.receive()

    def join(self, order: PushOrder, staging: "_Staging | None" = None) -> None:
        """Join the session of the order, unless this worker is in it.

        Raises:
            PushError: The session cannot be joined, or was abandoned.
        """
        self._version = order.version
        started = time.monotonic()
        self.receive_s = 0.0
        if self._member is None or self._member.session != order.session:
            if order.rendezvous is None or order.manifest is None:
                known = self._member.session if self._member else None
                raise PushError(
                    f"session {order.session} is unknown (the last session was {known}) and has no rendezvous and "
                    "manifest; the learner must start a new session"
                )
            self.leave_joined()
            rank = order.rendezvous.first_rank + self._number
            collective = join_collective(order.session, order.rendezvous, rank, self._device)
            with self._lock:
                if staging is not None and staging.is_abandoned:
                    collective.close()
                    raise PushInterrupted(f"session {order.session} was abandoned while it was joined")
                baseline = None
                if order.manifest.wire == "delta":
                    baseline = self._new_baseline(order.session, order.manifest)
                memory = BucketMemory(order.manifest, collective.device)
                self._member = SessionMembership(
                    order.session, rank, order.rendezvous, collective, order.manifest, baseline, memory
                )
        else:
            self._expect_adapter_alone()
        self.join_s = time.monotonic() - started

    def _expect_adapter_alone(self) -> None:
        """Receive only the adapter from now on, with less memory, if the session has one."""
        with self._lock:
            if (member := self._member) is None or (later := member.manifest.of_later_syncs()) == member.manifest:
                return
            memory = BucketMemory(later, member.collective.device)
            self._member = msgspec.structs.replace(member, manifest=later, memory=memory, kept={})

    def receive(self) -> Iterator[ReceivedBucket]:
        """Yield the buckets of one sync as they arrive.

        Raises:
            PushError: Receiving has failed, or the session was abandoned.
        """
        member = self._member
        if member is None:
            raise PushInterrupted("the session was abandoned before the weights were received")
        if member.baseline is not None:
            arriving = receive_changes(member.collective, member.manifest, member.baseline)
        else:
            arriving = receive_weights(member.collective, member.manifest, member.memory)
        checksums = []
        waiting_since = time.monotonic()
        with watched(member.collective, member.rendezvous, member.session, member.rank, self._version) as watch:
            for arrived in arriving:
                watch.loading_since = time.monotonic()
                self.receive_s += watch.loading_since - waiting_since
                checksums.append(arrived.checksum)
                yield arrived
                del arrived  # Otherwise its memory is not free for the next bucket.
                watch.loading_since, waiting_since = None, time.monotonic()
        self.checksum = checksum_of(checksums)

    def receive_in_host_memory(self) -> Iterator[ReceivedBucket]:
        """Yield the buckets as `receive` does, in memory where all of them may stay until the sync is complete."""
        member = self._member
        # Of the syncs of deltas, only the first arrives on a GPU. Later ones are in the baseline.
        kept = {} if member is None or member.baseline is not None else member.kept
        return map(partial(in_host_memory, kept), self.receive())  # a loop variable would keep a bucket on the GPU

    def leave(self, session: str | None = None) -> None:
        """Leave the given session, or the current one if None."""
        staged_session = self._staging.order.session if self._staging is not None else None
        if session in (None, staged_session):
            self._drop_staging()
        if session is None or (self._member is not None and self._member.session == session):
            self.leave_joined()

    def leave_joined(self) -> None:
        """Leave the session that was joined last."""
        with self._lock:
            member, self._member = self._member, None
        if member is not None:
            member.collective.close()
            if member.baseline is not None:
                member.baseline.close()

    def _drop_staging(self) -> None:
        staging, self._staging = self._staging, None
        if staging is None:
            return
        with self._lock:
            staging.is_abandoned = True
            member = self._member
        if staging.is_alive() and member is not None:
            member.collective.abort()
        staging.join(LEAVE_TIMEOUT_S)


def in_host_memory(kept: dict[int, torch.Tensor], arrived: ReceivedBucket) -> ReceivedBucket:
    """Return the bucket in host memory. Of a GPU, which has no room for two models, it is copied to `kept`."""
    if arrived.buffer.device.type == "cpu":
        return arrived
    index = arrived.bucket.index
    if index not in kept:
        kept[index] = empty_in_host_memory(arrived.buffer.shape, torch.uint8)
    return msgspec.structs.replace(arrived, buffer=kept[index].copy_(arrived.buffer))


class _Staging(threading.Thread):
    """Thread that receives one sync while the engine generates."""

    def __init__(self, receiver: Receiver, order: PushOrder, successor: Successor | None) -> None:
        super().__init__(name="push-staging", daemon=True)
        self.order, self.successor, self._receiver = order, successor, receiver
        self._buckets: list[ReceivedBucket] = []
        self.failure: PushError | None = None
        self.is_abandoned = False

    def run(self) -> None:
        try:
            self._receiver.join(self.order, self)
            if self.successor is not None:
                self.successor.receive(self._receiver.receive())
            else:
                self._buckets.extend(self._receiver.receive_in_host_memory())
        # Any failure must reach the worker's report: a thread that ends silently looks like a received sync.
        except Exception as failure:
            # Keep only the text: the traceback would keep the session's sockets open.
            kind = type(failure) if isinstance(failure, PushIncomplete | PushInterrupted) else PushError
            self.failure = kind(f"{type(failure).__name__}: {failure}")
            self.successor = None
            # The thread that abandoned a sync leaves its session, and may have joined another one since.
            if not self.is_abandoned:
                self._receiver.leave_joined()

    def is_for(self, order: PushOrder) -> bool:
        """Return whether this is the sync of an order. A retry of a version has another session."""
        return (self.order.session, self.order.version) == (order.session, order.version)

    def finish(self) -> None:
        """Wait for the end of the thread. Raises PushError if receiving has failed."""
        self.join()
        if self.failure is not None:
            raise self.failure

    def take(self) -> Iterator[ReceivedBucket]:
        """Yield each bucket and release it. Raises PushError if receiving has failed."""
        self.finish()
        while self._buckets:
            yield self._buckets.pop(0)
