"""A message to ZeroMQ frames and back.

A message is multipart: one msgpack header, then one raw little-endian frame per array. The header says which dtype and
length each frame must have, and nothing is used before the frames agree with it.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from protocol.errors import ProtocolError
from protocol.messages import DTYPES

M = TypeVar("M")

MAX_COMPLAINT_CHARACTERS = 300
"""A complaint quotes what came, which may be megabytes."""


def encode(message: msgspec.Struct) -> list[bytes | memoryview]:
    """Return the frames of a message: the header, then one frame per array, in the order the header names them."""
    arrays: list[np.ndarray] = []

    def enc_hook(value: Any) -> list[Any]:
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"cannot encode {type(value).__name__}")
        arrays.append(np.ascontiguousarray(value))
        return [len(arrays) - 1, value.dtype.name, len(value)]

    header = msgspec.msgpack.encode(message, enc_hook=enc_hook)
    return [header, *(array.data.cast("B") if len(array) else b"" for array in arrays)]


def decode(frames: Sequence[bytes | memoryview], expected: type[M]) -> M:
    """Decode the frames of one message of type `expected` (a union of messages).

    Raises ProtocolError if the header does not fit `expected` or the frames differ from what the header announces.
    """

    unclaimed = set(range(len(frames) - 1))

    def dec_hook(wanted: type, value: Any) -> Any:
        if wanted is not np.ndarray:
            raise NotImplementedError(f"cannot decode {wanted}")
        array = _array_from_frame(value, frames)
        if value[0] not in unclaimed:
            raise ValueError(f"frame {value[0]} is announced twice")
        unclaimed.remove(value[0])
        return array

    if not frames:
        raise ProtocolError("a message without frames came; expected a msgpack header")
    try:
        message = msgspec.msgpack.decode(frames[0], type=expected, dec_hook=dec_hook)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not a valid message: {_in_one_line(error)}") from error
    if unclaimed:
        raise ProtocolError(
            f"{len(frames) - 1} array frames came, {len(unclaimed)} of them announced by no header field"
        )
    return message


def _in_one_line(error: Exception) -> str:
    """Without the line breaks with which a peer could write lines of its own into the log."""
    return str(error)[:MAX_COMPLAINT_CHARACTERS].encode("unicode_escape").decode()


def _array_from_frame(announced: Any, frames: Sequence[bytes | memoryview]) -> np.ndarray:
    match announced:
        case [int(index), str(dtype), int(length)] if dtype in DTYPES and 0 <= index < len(frames) - 1 and length >= 0:
            frame = frames[index + 1]
            if len(frame) != length * DTYPES[dtype].itemsize:
                raise ValueError(f"frame {index} has {len(frame)} bytes, announced were {length} of {dtype}")
            return np.frombuffer(frame, dtype=DTYPES[dtype])
    raise ValueError(f"no frame fits the announced array {str(announced)[:80]}; {len(frames) - 1} frames came")


def pack(message: msgspec.Struct) -> bytes:
    """Return a message as one byte string, for storage."""
    return msgspec.msgpack.encode([bytes(frame) for frame in encode(message)])


def unpack(packed: bytes, expected: type[M]) -> M:
    """Undo `pack`. Raises ProtocolError."""
    return decode(msgspec.msgpack.decode(packed, type=list[bytes]), expected)
