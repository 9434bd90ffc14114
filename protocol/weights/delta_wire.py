"""A push that carries only what has changed since the last push of its epoch; sender and receiver side by side.

    flat bucket ─▶ encode against the baseline ─▶ size, changes, trailer ═▶ decode onto the baseline ─▶ checked ─▶ load

Both sides keep the last push as flat buckets. The first push of an epoch has none to compare with and goes as a dense one: to
look for changes against nothing would take many times as long. The trailer has the checksum of the whole bucket. Any failure
ends the epoch and with it the baseline.
"""

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from protocol.collective.group import Collective
from protocol.errors import PushError
from protocol.messages import Manifest
from protocol.weights.buckets import ALIGNMENT_BYTES, Bucket, NamedTensors, cut, spec_dtype
from protocol.weights.checksum import Checksum, checksum_of
from protocol.weights.delta import decode, encode, max_encoded_bytes
from protocol.weights.dense import (
    Arrived,
    Frames,
    Progress,
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
    """The bytes of the last push, in host memory, bucket by bucket; none before the first."""

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
        """Around the change of a bucket; False where another process has made it already. Raises PushError."""
        yield True

    def close(self) -> None:
        """Let go of the memory."""
        self._buffers.clear()

    def filled(self, buckets: list[Bucket], tensors: NamedTensors) -> NamedTensors:
        """Yield the tensors as they travel, each bucket's once it is here."""
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
    """Send what differs from the baseline, which then holds these tensors. Raises PushError, ValueError as send_weights."""
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


def receive_changes(collective: Collective, manifest: Manifest, baseline: Baseline) -> Iterator[Arrived]:
    """Yield every bucket in order while the next one is on its way. Raises PushError.

    The buffers are the baseline's, but for the first push, whose are on the collective's device.
    """
    if baseline.is_empty:
        yield from _receive_first(collective, manifest, baseline)
        return
    buckets = cut(manifest)
    with _transfer_thread(collective) as thread:
        coming = deque(thread.submit(_receive_frames, collective, bucket) for bucket in buckets[:1])
        for bucket in buckets:
            coming += [thread.submit(_receive_frames, collective, after) for after in buckets[bucket.index + 1 :][:1]]
            base = baseline.of(bucket)
            try:
                changes, trailer = coming.popleft().result()
                with baseline.changing(bucket) as is_ours:
                    if is_ours:
                        decode(changes.cpu().numpy(), base, word_bytes(bucket))
                    checksum = _checksum(base)
                    check_trailer(bucket, trailer, checksum)
            except PushError as error:
                raise in_bucket(bucket, len(buckets), error) from error
            yield Arrived(bucket, base, checksum)


def _receive_first(collective: Collective, manifest: Manifest, baseline: Baseline) -> Iterator[Arrived]:
    for arrived in receive_weights(collective, manifest):
        # Tensor by tensor: what is in the gaps between them was not sent, and is zeros in the baseline.
        with baseline.changing(arrived.bucket) as is_ours:
            if is_ours:
                fill(arrived.bucket, baseline.of(arrived.bucket), iter(arrived.bucket.views(arrived.buffer)))
        yield arrived
        del arrived  # or its memory would not be free for the next bucket


def word_bytes(bucket: Bucket) -> int:
    """Return the size of the elements that most of the bucket's bytes belong to."""
    num_bytes = Counter[int]()
    for slot in bucket.slots:
        num_bytes[spec_dtype(slot.spec).itemsize] += slot.num_bytes
    return num_bytes.most_common(1)[0][0]


def _receive_frames(collective: Collective, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bucket's changes, encoded, and its trailer."""
    num_changes, num_bytes = receive_bytes(collective, ALIGNMENT_BYTES).cpu().view(torch.int64).tolist()
    most = max_encoded_bytes(bucket.num_bytes)
    if num_bytes != bucket.num_bytes or not 0 <= num_changes <= most:
        raise PushError(
            f"{num_changes} bytes of changes to a bucket of {num_bytes} were announced; expected at most {most} to "
            f"{bucket.num_bytes}"
        )
    return receive_bytes(collective, num_changes), receive_bytes(collective, ALIGNMENT_BYTES)


@contextmanager
def _transfer_thread(collective: Collective) -> Iterator[ThreadPoolExecutor]:
    """A thread for the broadcasts; whatever goes wrong outside it ends the one under way, so that it can be left."""
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
