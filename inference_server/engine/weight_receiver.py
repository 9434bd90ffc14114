"""A worker's end of the transfer: joins epochs, receives pushes, beside generation if asked to.

    PushOrder ─▶ join the epoch ─▶ checked buckets ─▶ (a Successor, or kept until all have come) ─▶ the worker loads them

Knows nothing of vLLM. Invariant: a bucket is handed out at most once, checked; after any failure the epoch has been left.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import torch

from inference_server.engine.interface import PushOrder
from protocol.errors import PushError, PushIncomplete
from protocol.messages import Manifest, Rendezvous
from protocol.transports.group import Collective, join_collective, watched
from protocol.weights.buckets import BucketMemory, checksum_of
from protocol.weights.delta import Baseline, receive_changes
from protocol.weights.dense import Arrived, receive_weights

LEAVE_TIMEOUT_S = 10.0
"""A thread whose collective was aborted ends in less."""
NewBaseline = Callable[[int, str, Manifest], Baseline]
"""What changes of an epoch, which so many workers join, are decoded onto."""


class Successor(Protocol):
    """The weights of a staged push, made ready while others are served."""

    load_s: float
    """Seconds that loading took, without the waiting for buckets."""

    def take(self, arriving: Iterator[Arrived]) -> None:
        """Load all buckets as they come, in the thread that receives."""
        ...

    def take_over(self) -> None:
        """Be what is served from now on."""
        ...


class Membership(msgspec.Struct, frozen=True, eq=False):
    """One rank's place in one epoch."""

    epoch: str
    rendezvous: Rendezvous
    collective: Collective
    manifest: Manifest
    baseline: Baseline | None
    memory: BucketMemory


class Receiver:
    """Receives for one rank. `leave` ends whatever is under way."""

    def __init__(self, rank: int, device: torch.device, new_baseline: NewBaseline = lambda *_: Baseline()) -> None:
        self._rank, self._device, self._new_baseline = rank, device, new_baseline
        self._member: Membership | None = None
        self._staging: _Staging | None = None
        self._lock = threading.Lock()
        """Held where the membership changes: a join that was given up must not come into force."""
        self.join_s = self.receive_s = 0.0
        """Seconds the last push took to join and to receive."""
        self.checksum = ""
        """Of the bytes of the last push that has come whole."""

    def stage(self, order: PushOrder, successor: Successor | None = None) -> None:
        """Begin to join and receive in a thread; without a successor all buckets are kept until `buckets` takes them."""
        self._drop_staging()
        self._staging = _Staging(self, order, successor)
        self._staging.start()

    @property
    def is_staging(self) -> bool:
        return self._staging is not None and self._staging.is_alive()

    @property
    def failure(self) -> PushError | None:
        """What staging has failed with."""
        return self._staging.failure if self._staging is not None else None

    def successor(self, order: PushOrder) -> Successor | None:
        """Return what was made of a push, if it was staged so. Raises PushError."""
        staging = self._staging
        if staging is None or staging.successor is None or staging.order.version != order.version:
            return None
        self._staging = None
        staging.finish()
        return staging.successor

    def buckets(self, order: PushOrder) -> Iterator[Arrived]:
        """Yield the buckets of a push, from memory if it was staged, else as they come. Raises PushError."""
        staging, self._staging = self._staging, None
        if staging is not None and staging.order.version == order.version:
            yield from staging.take()
        else:
            self.join(order)
            yield from self.receive()

    def join(self, order: PushOrder, staging: "_Staging | None" = None) -> None:
        """Join the order's epoch unless we are in it. Raises PushError."""
        started = time.monotonic()
        self.receive_s = 0.0
        if self._member is None or self._member.epoch != order.epoch:
            if order.rendezvous is None or order.manifest is None:
                known = self._member.epoch if self._member else None
                raise PushError(
                    f"epoch {order.epoch} is not known here (the last one was {known}) and came without a rendezvous; "
                    "the learner must begin a new epoch"
                )
            self.leave_joined()
            collective = join_collective(order.epoch, order.rendezvous, self._rank, self._device)
            with self._lock:
                if staging is not None and staging.is_given_up:
                    collective.close()
                    raise PushError(f"epoch {order.epoch} was given up while it was joined")
                baseline = None
                if order.manifest.wire == "delta":
                    baseline = self._new_baseline(order.rendezvous.world_size - 1, order.epoch, order.manifest)
                memory = BucketMemory(order.manifest, collective.device)
                self._member = Membership(order.epoch, order.rendezvous, collective, order.manifest, baseline, memory)
        self.join_s = time.monotonic() - started

    def receive(self) -> Iterator[Arrived]:
        """Yield the buckets of one push as they come. Raises PushError."""
        member = self._member
        if member is None:
            raise PushError("the epoch was given up before the push was received")
        if member.baseline is not None:
            arriving = receive_changes(member.collective, member.manifest, member.baseline)
        else:
            arriving = receive_weights(member.collective, member.manifest, member.memory)
        checksums = []
        asked = time.monotonic()
        with watched(member.collective, member.rendezvous, member.epoch):
            for arrived in arriving:
                self.receive_s += time.monotonic() - asked
                checksums.append(arrived.checksum)
                yield arrived
                del arrived  # or its memory would not be free for the next bucket
                asked = time.monotonic()
        self.checksum = checksum_of(checksums)

    def leave(self, epoch: str | None = None) -> None:
        """Leave the given epoch, or whichever is current."""
        staged_epoch = self._staging.order.epoch if self._staging is not None else None
        if epoch in (None, staged_epoch):
            self._drop_staging()
        if epoch is None or (self._member is not None and self._member.epoch == epoch):
            self.leave_joined()

    def leave_joined(self) -> None:
        """Leave the group that was joined last."""
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
            staging.is_given_up = True
            member = self._member
        if staging.is_alive() and member is not None:
            member.collective.abort()
        staging.join(LEAVE_TIMEOUT_S)


def in_host_memory(arrived: Arrived) -> Arrived:
    """Return the bucket where it may lie until all have come: pinned, if it comes from a GPU, which has no room for two models."""
    if arrived.buffer.device.type == "cpu":
        return arrived
    pinned = torch.empty(len(arrived.buffer), dtype=torch.uint8, pin_memory=True)
    return msgspec.structs.replace(arrived, buffer=pinned.copy_(arrived.buffer))


class _Staging(threading.Thread):
    """Receives one push while the engine generates."""

    def __init__(self, receiver: Receiver, order: PushOrder, successor: Successor | None) -> None:
        super().__init__(name="push-staging", daemon=True)
        self.order, self.successor, self._receiver = order, successor, receiver
        self._buckets: list[Arrived] = []
        self.failure: PushError | None = None
        self.is_given_up = False

    def run(self) -> None:
        try:
            self._receiver.join(self.order, self)
            if self.successor is not None:
                self.successor.take(self._receiver.receive())
            else:
                self._buckets.extend(map(in_host_memory, self._receiver.receive()))
        # Whatever it is, it must be in the worker's report: a thread that just ends would look like a push that has come.
        except Exception as failure:
            # Only its words: its traceback would keep the sockets of the epoch open for as long as it is remembered.
            kind = PushIncomplete if isinstance(failure, PushIncomplete) else PushError
            self.failure = kind(f"{type(failure).__name__}: {failure}")
            self.successor = None
            if not self.is_given_up:  # else whoever gave it up leaves, and may have joined another epoch since
                self._receiver.leave_joined()

    def finish(self) -> None:
        """Wait for the end. Raises what receiving has failed with."""
        self.join()
        if self.failure is not None:
            raise self.failure

    def take(self) -> Iterator[Arrived]:
        """Yield each bucket and let go of it. Raises what receiving has failed with."""
        self.finish()
        while self._buckets:
            yield self._buckets.pop(0)
