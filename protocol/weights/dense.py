"""Sender and receiver of a dense weight sync.

    gather (or copy) ─▶ spans ─▶ check ─▶ broadcast ═▶ broadcast ─▶ check ─▶ whole buckets ─▶ load

Broadcasts continue while the caller gathers and checks. The sender is some spans ahead, and the receiver one
bucket. A trailer with number and checksum follows each bucket.
Invariant: a bucket that differs from what was sent is not handed on.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec
import torch

from protocol.errors import PushError
from protocol.messages import Manifest
from protocol.transports.collective import Collective
from protocol.weights.buckets import (
    ALIGNMENT_BYTES,
    Bucket,
    BucketMemory,
    BucketSlot,
    Checksum,
    NamedTensors,
    TensorRun,
    checksum_of,
    span_bytes_on,
    spec_dtype,
    split_into_buckets,
    view,
)

NUM_BROADCASTS_AHEAD = 3
"""Number of the sender's broadcasts in progress while it prepares another one. With one, the connection would
idle between two."""
NUM_BUFFERS = NUM_BROADCASTS_AHEAD + 2
"""Number of buffers that are used in turn, so that a buffer in progress is never written to."""

Frames = Iterable[tuple[int, torch.Tensor]]
"""Tensors to broadcast, each with the index of its bucket."""
Wait = Callable[[], object]
"""Function that returns when one broadcast has ended. Raises PushError."""
Start = Callable[[torch.Tensor], Wait]
"""Function that starts a broadcast while others are in progress."""
Progress = Callable[[int], object]
"""Callback that receives how many more bytes of the weights are done."""


def no_progress(num_bytes: int) -> None:
    """Ignore the progress."""


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Result of sending the weights."""

    checksum: str
    """Checksum of the checksums of all buckets."""
    num_bytes: int


def send_weights(
    collective: Collective,
    buckets: list[Bucket],
    tensors: NamedTensors,
    progress: Progress = no_progress,
) -> Sent:
    """Send all tensors.

    Raises:
        PushError: The transfer fails.
        ValueError: The tensors are not those that the buckets were cut for.
    """
    checksums: list[int] = []

    def frames() -> Frames:
        source = iter(tensors)
        scratch = deque(torch.empty(0, dtype=torch.uint8, device=collective.device) for _ in range(NUM_BUFFERS))
        trailers = itertools.cycle(
            torch.empty(NUM_BUFFERS, ALIGNMENT_BYTES, dtype=torch.uint8, device=collective.device)
        )
        for bucket in buckets:
            checksum = Checksum()
            for run in bucket.runs(span_bytes_on(collective.device)):
                for span in _run_spans(run, source, scratch, collective):
                    checksum.update(span)
                    yield bucket.index, span
                    progress(len(span))
            checksums.append(checksum.value())
            yield bucket.index, next(trailers).copy_(make_trailer(bucket, checksums[-1]))

    num_bytes = broadcast_frames(collective, frames())
    return Sent(checksum=checksum_of(checksums), num_bytes=num_bytes)


def broadcast_frames(collective: Collective, frames: Frames) -> int:
    """Broadcast in order while the next frames are made, and return the bytes sent.

    Raises:
        PushError: A broadcast fails.
    """
    num_sent = 0
    under_way: deque[tuple[Wait, int, int]] = deque()

    def wait_for_oldest() -> None:
        nonlocal num_sent
        wait, index, num_bytes = under_way.popleft()
        try:
            wait()
        except PushError as error:
            raise type(error)(f"bucket {index + 1}, after {num_sent} bytes in total: {error}") from error
        num_sent += num_bytes

    with transfers(collective) as start:
        for index, frame in frames:
            under_way.append((start(frame), index, len(frame)))
            if len(under_way) > NUM_BROADCASTS_AHEAD:
                wait_for_oldest()
        while under_way:
            wait_for_oldest()
    return num_sent


class ReceivedBucket(msgspec.Struct, frozen=True, eq=False):
    """Bucket that is complete and has been checked."""

    bucket: Bucket
    buffer: torch.Tensor
    """Flat uint8 tensor on the collective's device, or in host memory if it is part of a baseline."""
    checksum: int


def receive_weights(
    collective: Collective, manifest: Manifest, memory: BucketMemory | None = None
) -> Iterator[ReceivedBucket]:
    """Yield every bucket in order, while the next one is in transit.

    The next one waits if there is no memory for both. A bucket's memory is reused once nothing refers to it.
    `memory` keeps it from one weight sync of a manifest to the next.

    Raises:
        PushError: The transfer or a check fails.
    """
    buckets = split_into_buckets(manifest)
    memory = memory or BucketMemory(manifest, collective.device)
    with transfers(collective) as start:
        in_transit: deque[_BucketInTransit] = deque()
        for bucket in buckets:
            for near in buckets[bucket.index + len(in_transit) :][: 2 - len(in_transit)]:
                if near is bucket or memory.has_room(near.num_bytes):
                    in_transit.append(_BucketInTransit(start, near, memory))
            try:
                arrived = in_transit.popleft().wait()
            except PushError as error:
                raise in_bucket(bucket, len(buckets), error) from error
            yield arrived
            del arrived  # otherwise its memory is not free for the next bucket


class _BucketInTransit:
    """Bucket in transit into memory."""

    def __init__(self, start: Start, bucket: Bucket, memory: BucketMemory) -> None:
        self._bucket, self._buffer = bucket, memory.lend(bucket.num_bytes)
        self._trailer = torch.empty(ALIGNMENT_BYTES, dtype=torch.uint8, device=self._buffer.device)
        self._spans = [(span, start(span)) for span in bucket.spans(self._buffer)]
        self._wait_for_trailer = start(self._trailer)

    def wait(self) -> ReceivedBucket:
        """Return the bucket. Each span is checked as it arrives.

        Raises:
            PushError: The transfer or the check fails.
        """
        checksum = Checksum()
        for span, wait in self._spans:
            wait()
            checksum.update(span)
        self._wait_for_trailer()
        check_trailer(self._bucket, self._trailer, checksum.value())
        return ReceivedBucket(self._bucket, self._buffer, checksum.value())


def receive_bytes(collective: Collective, num_bytes: int) -> torch.Tensor:
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=collective.device)
    collective.broadcast(buffer)
    return buffer


def in_bucket(bucket: Bucket, num_buckets: int, error: PushError) -> PushError:
    return type(error)(f"bucket {bucket.index + 1} of {num_buckets} ({bucket.num_bytes} bytes): {error}")


def fill(bucket: Bucket, buffer: torch.Tensor, source: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Copy the bucket's tensors into its flat buffer."""
    for slot in bucket.slots:
        view(slot, buffer, 0).copy_(_next_tensor(slot, source))


def check_trailer(bucket: Bucket, trailer: torch.Tensor, checksum: int) -> None:
    """Raise PushError unless the trailer matches this bucket and its checksum."""
    index, expected = trailer.cpu().view(torch.int64).tolist()
    if (index, expected) != (bucket.index, _signed(checksum)):
        raise PushError(
            f"the sender announced bucket {index + 1} with checksum {expected % (1 << 64):016x}, "
            f"but the received bytes have checksum {checksum:016x}"
        )


def make_trailer(bucket: Bucket, checksum: int) -> torch.Tensor:
    """Return the bytes that follow a bucket: its number and its checksum."""
    return torch.tensor([bucket.index, _signed(checksum)]).view(torch.uint8)


@contextmanager
def transfers(collective: Collective) -> Iterator[Start]:
    """Yield a function that starts a broadcast. Any error aborts those in progress."""
    try:
        yield collective.start_broadcast
    except BaseException:
        collective.abort()
        raise


def _run_spans(
    run: TensorRun, source: Iterator[tuple[str, torch.Tensor]], scratch: deque[torch.Tensor], collective: Collective
) -> Iterator[torch.Tensor]:
    """Yield the run's spans.

    They are parts of a large tensor in place, or scratch memory with what had to be copied.
    """
    if not run.is_large:
        buffer = _next_scratch(scratch, run.end - run.start)
        for slot in run.slots:
            view(slot, buffer, run.start).copy_(_next_tensor(slot, source))
        for before, after in itertools.pairwise(run.slots):
            if before.end < after.start:  # the gaps between tensors are part of the checksum
                buffer[before.end - run.start : after.start - run.start].zero_()
        if len(buffer):
            yield buffer
        return
    (slot,) = run.slots
    dtype = spec_dtype(slot.spec)
    for piece_N in _next_tensor(slot, source).reshape(-1).split(span_bytes_on(collective.device) // dtype.itemsize):
        fits = piece_N.dtype == dtype and piece_N.device == collective.device
        if collective.sends_in_place and fits and piece_N.data_ptr() % ALIGNMENT_BYTES == 0:
            yield piece_N.view(torch.uint8)
        else:
            buffer = _next_scratch(scratch, len(piece_N) * dtype.itemsize)
            buffer.view(dtype).copy_(piece_N)
            yield buffer


def _next_scratch(scratch: deque[torch.Tensor], num_bytes: int) -> torch.Tensor:
    """Return that many bytes of the buffer that was used longest ago.

    Fresh memory for each span would cost more than the copy.
    """
    buffer = scratch.popleft()
    if len(buffer) < num_bytes:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=buffer.device)
    scratch.append(buffer)
    return buffer[:num_bytes]


def _next_tensor(slot: BucketSlot, source: Iterator[tuple[str, torch.Tensor]]) -> torch.Tensor:
    name, tensor = next(source, ("nothing", torch.empty(0)))
    if name != slot.spec.name or tuple(tensor.shape) != slot.spec.shape:
        raise ValueError(
            f"the manifest expects {slot.spec.name} of shape {slot.spec.shape}, but the model has {name} of shape "
            f"{tuple(tensor.shape)}; a model must not change its parameters within a session"
        )
    return tensor.detach()


def _signed(checksum: int) -> int:
    return checksum - (1 << 64) if checksum >> 63 else checksum
