"""Weight sync that carries only what has changed since the last one, without loss.

    bucket ─▶ encode against baseline ─▶ size, changes, trailer ═▶ decode onto baseline ─▶ check ─▶ load

Both sides keep the last weight sync as flat buckets. The first one of a session is dense, because encoding
against nothing takes many times as long. The trailer holds the checksum of the whole bucket. Any failure ends
the session and its baseline.

Invariant: a message does not name its base. With another base, the checksum fails.
"""

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from protocol.errors import PushError
from protocol.messages import Manifest
from protocol.transports.collective import Collective
from protocol.weights.buckets import (
    ALIGNMENT_BYTES,
    Bucket,
    Checksum,
    NamedTensors,
    checksum_of,
    spec_dtype,
    split_into_buckets,
)
from protocol.weights.delta_codec import decode, encode, max_encoded_bytes
from protocol.weights.dense import (
    Frames,
    Progress,
    ReceivedBucket,
    Sent,
    broadcast_frames,
    check_trailer,
    fill,
    in_bucket,
    make_trailer,
    no_progress,
    receive_bytes,
    receive_weights,
    send_weights,
)


class Baseline:
    """Bytes of the last weight sync in host memory, bucket by bucket.

    It is empty before the first weight sync.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}

    @property
    def is_empty(self) -> bool:
        return not self._buffers

    def of(self, bucket: Bucket) -> torch.Tensor:
        if bucket.index not in self._buffers:
            self._buffers[bucket.index] = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        return self._buffers[bucket.index]

    @contextmanager
    def changing(self, bucket: Bucket) -> Iterator[bool]:
        """Enclose the change of a bucket, and yield whether this process makes it.

        It yields False if another process has already made the change.

        Raises:
            PushError: Another process has failed to make it.
        """
        yield True

    def close(self) -> None:
        """Release the memory."""
        self._buffers.clear()

    def filled(self, buckets: list[Bucket], tensors: NamedTensors) -> NamedTensors:
        """Fill the baseline, and yield its tensors once their bucket is filled."""
        source = iter(tensors)
        for bucket in buckets:
            fill(bucket, self.of(bucket), source)
            yield from bucket.views(self.of(bucket))


def send_changes(
    collective: Collective,
    buckets: list[Bucket],
    tensors: NamedTensors,
    baseline: Baseline,
    progress: Progress = no_progress,
) -> Sent:
    """Send what differs from the baseline, which then holds these tensors.

    Raises:
        PushError: The transfer fails.
        ValueError: As in `send_weights`.
    """
    if baseline.is_empty:
        return send_weights(collective, buckets, baseline.filled(buckets, tensors), progress)
    checksums: list[int] = []

    def frames() -> Frames:
        source = iter(tensors)
        for bucket in buckets:
            base, new = baseline.of(bucket), torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            fill(bucket, new, source)
            changes = torch.from_numpy(encode(new, base, word_bytes(bucket)))
            base.copy_(new)
            checksums.append(_checksum(new))
            size = torch.tensor([len(changes), bucket.num_bytes]).view(torch.uint8)
            for frame in (size, changes, make_trailer(bucket, checksums[-1])):
                yield bucket.index, frame.to(collective.device)
            progress(bucket.num_bytes)

    num_bytes = broadcast_frames(collective, frames())
    return Sent(checksum=checksum_of(checksums), num_bytes=num_bytes)


def receive_changes(collective: Collective, manifest: Manifest, baseline: Baseline) -> Iterator[ReceivedBucket]:
    """Yield every bucket in order while the next one is in transit.

    The buffers are those of the baseline. In the first weight sync, they are on the collective's device.

    Raises:
        PushError: The transfer or a check fails.
    """
    if baseline.is_empty:
        yield from _receive_first(collective, manifest, baseline)
        return
    buckets = split_into_buckets(manifest)
    with _transfer_thread(collective) as thread:
        in_transit = deque(thread.submit(_receive_frames, collective, bucket) for bucket in buckets[:1])
        for bucket in buckets:
            in_transit += [
                thread.submit(_receive_frames, collective, after) for after in buckets[bucket.index + 1 :][:1]
            ]
            base = baseline.of(bucket)
            try:
                changes, trailer = in_transit.popleft().result()
                with baseline.changing(bucket) as is_ours:
                    if is_ours:
                        decode(changes.cpu().numpy(), base, word_bytes(bucket))
                    checksum = _checksum(base)
                    check_trailer(bucket, trailer, checksum)
            except PushError as error:
                raise in_bucket(bucket, len(buckets), error) from error
            yield ReceivedBucket(bucket, base, checksum)


def _receive_first(collective: Collective, manifest: Manifest, baseline: Baseline) -> Iterator[ReceivedBucket]:
    for arrived in receive_weights(collective, manifest):
        # Tensor by tensor: the gaps between tensors are zeros in the baseline, and not always sent.
        with baseline.changing(arrived.bucket) as is_ours:
            if is_ours:
                fill(arrived.bucket, baseline.of(arrived.bucket), iter(arrived.bucket.views(arrived.buffer)))
        yield arrived
        del arrived  # otherwise its memory is not free for the next bucket


def word_bytes(bucket: Bucket) -> int:
    """Return the size of the elements that most of the bucket's bytes belong to."""
    num_bytes = Counter[int]()
    for slot in bucket.slots:
        num_bytes[spec_dtype(slot.spec).itemsize] += slot.num_bytes
    return num_bytes.most_common(1)[0][0]


def _receive_frames(collective: Collective, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bucket's encoded changes and its trailer.

    Raises:
        PushError: The transfer fails, or the announced sizes do not fit the bucket.
    """
    num_changes, num_bytes = receive_bytes(collective, ALIGNMENT_BYTES).cpu().view(torch.int64).tolist()
    most = max_encoded_bytes(bucket.num_bytes)
    if num_bytes != bucket.num_bytes or not 0 <= num_changes <= most:
        raise PushError(
            f"the sender announced {num_changes} bytes of changes to a bucket of {num_bytes} bytes; expected at most "
            f"{most} bytes of changes to {bucket.num_bytes} bytes"
        )
    return receive_bytes(collective, num_changes), receive_bytes(collective, ALIGNMENT_BYTES)


@contextmanager
def _transfer_thread(collective: Collective) -> Iterator[ThreadPoolExecutor]:
    """Yield a thread for the broadcasts, and abort the current one on any error.

    Otherwise, leaving the thread would wait for the broadcast.
    """
    with ThreadPoolExecutor(1, "push-transfer") as thread:
        try:
            yield thread
        except BaseException:
            thread.shutdown(wait=False, cancel_futures=True)
            collective.abort()
            raise


def _checksum(buffer: torch.Tensor) -> int:
    checksum = Checksum()
    checksum.update(buffer)
    return checksum.value()
