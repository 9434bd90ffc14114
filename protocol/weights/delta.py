"""Weight sync that carries only what has changed since the last one, without loss.

    bucket ─▶ encode against baseline ─▶ size, changes, trailer ═▶ decode onto baseline ─▶ check ─▶ load

Both sides keep the last weight sync as flat buckets. The first one of a session is dense, because encoding
against nothing takes many times as long. The trailer holds the checksum of the whole bucket. Any failure ends
the session and its baseline.

Invariant: nothing in a message is used before it is checked against the size of the base. A message does not
name its base. With another base, the checksum fails.
"""

import struct
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
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

CHUNK_BYTES = 2 << 20
"""Size of the chunks in which a bucket is encoded. Temporary arrays of a chunk that changed everywhere take
20 times its size at 2-byte words (measured; 10 times at 4 bytes, 40 at 1). Half the size costs 1 % of the
ratio."""
SAMPLE_WORDS = 1 << 12
"""Approximate number of changed words on which DIFFERENCE and OVERWRITE are compared per chunk. zlib takes
most of the time."""
DENSE, DIFFERENCE, OVERWRITE = range(3)
# Kind, number of changed words, bytes of gaps, bytes of deflated gaps, bytes of deflated values.
_HEADER = struct.Struct("<BIIII")


class _Frame(NamedTuple):
    """Chunk of a message: the first header fields, and the payload in two parts."""

    kind: int
    num_changed: int
    num_gap_bytes: int
    gaps: bytes | memoryview
    values: bytes | memoryview


def encode(new: torch.Tensor, base: torch.Tensor, element_bytes: int) -> np.ndarray:
    """Return a writable uint8 array that turns `base` into `new`.

    Both are flat uint8 on the CPU, of the same length, which is a multiple of 8. `element_bytes` (1, 2, 4 or
    8) is the size of most of their elements. A bucket of several dtypes is still exact, but its other
    elements cost more. The result is at most one header per chunk longer than `new`.

    Each chunk is a header and the smallest of these payloads:

        DENSE       the chunk as it is
        DIFFERENCE  zlib(gaps), zlib(planes of new − base, as integers)
        OVERWRITE   zlib(gaps), zlib(planes of new)

    A gap is the number of unchanged words before a changed one, in bytes. The byte 255 continues in the next
    byte. Plane p holds byte p of every value, so that the nearly constant high bytes are adjacent. Words are
    compared as unsigned integers whatever their dtype, so every bit pattern arrives, including NaN and −0.
    """
    if new.shape != base.shape:
        raise ValueError(f"a bucket of {len(new)} bytes cannot be encoded against a base of {len(base)}")
    parts: list[bytes | memoryview] = []
    for chunk, chunk_base in zip(_chunks(new, element_bytes), _chunks(base, element_bytes), strict=True):
        frame = _encode_chunk(chunk, chunk_base)
        parts += [_HEADER.pack(*frame[:3], len(frame.gaps), len(frame.values)), frame.gaps, frame.values]
    return np.frombuffer(bytearray().join(parts), np.uint8)


def decode(encoded: np.ndarray, base: torch.Tensor, element_bytes: int) -> None:
    """Turn `base` into the bucket that was encoded against it, in place.

    A chunk is changed completely or not at all. After an error, earlier chunks have changed, so only a dense
    weight sync repairs the base.

    Raises:
        PushError: If the message is malformed.
    """
    chunks = _chunks(base, element_bytes)
    for chunk, frame in zip(chunks, _parse(encoded.data, chunks), strict=True):
        _decode_chunk(frame, chunk)


def _chunks(buffer: torch.Tensor, element_bytes: int) -> list[np.ndarray]:
    words = buffer.numpy().view(f"<u{element_bytes}")
    num_words = CHUNK_BYTES // element_bytes
    return [words[start : start + num_words] for start in range(0, len(words), num_words)]


def _encode_chunk(new: np.ndarray, base: np.ndarray) -> _Frame:
    changed = np.flatnonzero(new != base)
    gaps = _pack_gaps(changed)
    # A weight that is rounded to a neighbor of its old value differs by ±1, however far the carry goes. XOR
    # would show the carry, and takes one bit more per changed word (measured).
    candidates = {DIFFERENCE: _planes(_zigzag(new[changed] - base[changed])), OVERWRITE: _planes(new[changed])}
    every = len(changed) // SAMPLE_WORDS + 1
    kind = min(candidates, key=lambda kind: len(_deflate(candidates[kind][:, ::every].copy())))
    deflated_gaps = _deflate(gaps)
    deflated_values = _deflate(candidates[kind])
    if len(deflated_gaps) + len(deflated_values) >= new.nbytes:
        return _Frame(DENSE, 0, 0, b"", new.view(np.uint8).data)
    return _Frame(kind, len(changed), len(gaps), deflated_gaps, deflated_values)


def _parse(message: memoryview, chunks: list[np.ndarray]) -> list[_Frame]:
    """Cut a message into one frame per chunk of the base.

    Raises:
        PushError: If the message does not fit the chunks.
    """
    frames: list[_Frame] = []
    offset = 0
    for chunk in chunks:
        if len(message) - offset < _HEADER.size:
            raise _malformed(f"it ends after {len(frames)} chunks, expected {len(chunks)}")
        kind, num_changed, num_gap_bytes, num_deflated_gaps, num_values = _HEADER.unpack_from(message, offset)
        gaps_start = offset + _HEADER.size
        values_start = gaps_start + num_deflated_gaps
        offset = values_start + num_values
        frame = _Frame(kind, num_changed, num_gap_bytes, message[gaps_start:values_start], message[values_start:offset])
        if not _fits(frame, chunk):
            raise _malformed(f"chunk {len(frames)} announces {frame[:3]}, which does not fit its {chunk.size} words")
        frames.append(frame)
    if offset != len(message):
        raise _malformed(f"its {len(chunks)} chunks end at byte {offset}, the message at {len(message)}")
    return frames


def _fits(frame: _Frame, chunk: np.ndarray) -> bool:
    if frame.kind == DENSE:
        return len(frame.values) == chunk.nbytes
    return (
        frame.kind in (DIFFERENCE, OVERWRITE)
        and frame.num_changed <= chunk.size
        and frame.num_gap_bytes <= frame.num_changed + chunk.size // 255
    )


def _decode_chunk(frame: _Frame, chunk: np.ndarray) -> None:
    if frame.kind == DENSE:
        chunk[:] = np.frombuffer(frame.values, chunk.dtype)
        return
    gaps = _inflate(frame.gaps, frame.num_gap_bytes)
    changed = _unpack_gaps(np.frombuffer(gaps, np.uint8), frame.num_changed, chunk.size)
    planes = _inflate(frame.values, frame.num_changed * chunk.itemsize)
    values = _from_planes(np.frombuffer(planes, np.uint8), chunk.dtype)
    if frame.kind == OVERWRITE:
        chunk[changed] = values
    else:
        chunk[changed] += _from_zigzag(values)


def _pack_gaps(changed: np.ndarray) -> np.ndarray:
    gaps = np.diff(changed, prepend=-1) - 1
    num_escapes = gaps // 255
    last_bytes = (gaps - 255 * num_escapes).astype(np.uint8)
    return np.insert(last_bytes, np.repeat(np.arange(len(gaps)), num_escapes), 255)


def _unpack_gaps(packed: np.ndarray, num_changed: int, num_words: int) -> np.ndarray:
    """Return the indices of the changed words, strictly increasing.

    Raises:
        PushError: If their number differs from `num_changed`, or one is not in the chunk.
    """
    ends = np.flatnonzero(packed != 255)
    if len(ends) != num_changed or (len(packed) and packed[-1] == 255):
        raise _malformed(f"its gaps lead to {len(ends)} changed words, expected {num_changed}")
    changed = np.cumsum(packed, dtype=np.int64)[ends] + np.arange(num_changed)
    if num_changed and changed[-1] >= num_words:
        raise _malformed(f"its gaps lead to word {changed[-1]} of {num_words}")
    return changed


def _planes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values.view(np.uint8).reshape(len(values), values.itemsize).T)


def _from_planes(planes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).view(dtype).ravel()


def _zigzag(differences: np.ndarray) -> np.ndarray:
    """Map 0, −1, 1, −2 … to 0, 1, 2, 3 ….

    A small difference of either sign then leaves the high planes zero.
    """
    signed = differences.view(f"<i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(differences.dtype)


def _from_zigzag(values: np.ndarray) -> np.ndarray:
    return (values >> 1) ^ -(values & 1)


def _deflate(array: np.ndarray) -> bytes:
    # There are no matches to find. The default strategy searches for them, and is slower and larger.
    deflater = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    return deflater.compress(array.data) + deflater.flush()


def _inflate(deflated: bytes | memoryview, num_bytes: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        # The extra byte reveals a stream that is too long before it fills the memory. A limit of 0 would be
        # none.
        inflated = inflater.decompress(deflated, num_bytes + 1)
    except zlib.error as error:
        raise _malformed(f"it cannot be inflated: {error}") from error
    if len(inflated) != num_bytes or not inflater.eof or inflater.unused_data:
        raise _malformed(f"it does not inflate to the announced {num_bytes} bytes")
    return inflated


def _malformed(what: str) -> PushError:
    return PushError(f"received a malformed delta: {what}; the next weight sync must be dense")


def max_encoded_bytes(num_bytes: int) -> int:
    """Return the maximum size of an encoded bucket, in bytes."""
    return num_bytes + _HEADER.size * -(-num_bytes // CHUNK_BYTES)


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
            PushError: If another process has failed to make it.
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
        PushError: If the transfer fails.
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
        PushError: If the transfer or a check fails.
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
        PushError: If the transfer fails, or the announced sizes do not fit the bucket.
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
