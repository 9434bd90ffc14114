"""Encoding of a bucket against an earlier one, without loss: only the words that changed, and compressed.

delta.py sends the result. Pure functions of bytes in host memory.
Invariant: nothing in a message is used before it is checked against the size of the base. A message does not
name its base.
"""

import struct
import zlib
from typing import NamedTuple

import numpy as np
import torch

from protocol.errors import PushError

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
        PushError: The message is malformed.
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
        PushError: The message does not fit the chunks.
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
        PushError: Their number differs from `num_changed`, or one is not in the chunk.
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
