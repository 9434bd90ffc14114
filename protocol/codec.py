"""A message to ZeroMQ frames and back.

A message is multipart: one msgpack header, then one raw little-endian frame per array, in the order in which the header names
them. The header says which dtype and length each frame must have, and nothing is used before the frames agree with it.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from protocol.errors import ProtocolError
from protocol.messages import DTYPES

M = TypeVar("M")
Frames = Sequence[Any]
"""Of bytes, or as ZeroMQ has received them: then the arrays of a message stay where they came."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_COMPLAINT_CHARACTERS = 300
"""A complaint quotes what came, which may be megabytes."""


def encode(message: msgspec.Struct) -> list[bytes]:
    """Return the frames of a message: the header, then one frame per array, in the order the header names them."""
    frames = [b""]

    def announce(array: Any) -> tuple[int, str, int]:
        if not isinstance(array, np.ndarray):
            raise NotImplementedError(f"cannot encode {type(array).__name__}")
        frames.append(array.tobytes())
        return len(frames) - 2, NAMES[array.dtype], len(array)

    frames[0] = msgspec.msgpack.encode(message, enc_hook=announce)
    return frames


class Decoder(Generic[M]):
    """Makes messages of type `expected` (a union of messages) out of frames. Of one thread."""

    def __init__(self, expected: type[M]) -> None:
        # Made once: to make one takes as long as half of what it does for a group.
        self._header = msgspec.msgpack.Decoder(expected, dec_hook=self._take)
        self._arrays: Frames = ()
        self._num_taken = 0

    def decode(self, frames: Frames) -> M:
        """Raises ProtocolError if the header is no such message or the frames differ from what the header announces."""
        if not frames:
            raise ProtocolError("a message without frames came; expected a msgpack header")
        self._arrays, self._num_taken = frames[1:], 0
        try:
            message = self._header.decode(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a valid message: {_in_one_line(error)}") from error
        finally:
            self._arrays = ()
        if (num_announced := self._num_taken) != len(frames) - 1:
            raise ProtocolError(
                f"{len(frames) - 1} array frames came, {num_announced} of them announced by a header field"
            )
        return message

    def _take(self, _: type, announced: Any) -> np.ndarray:
        """Return the array that the header announces. For msgspec, which takes a ValueError or TypeError for a wrong header."""
        index, name, length = announced
        try:
            array = np.frombuffer(self._arrays[index], DTYPES[name])
            fits = index == self._num_taken and type(length) is int and len(array) == length
        except (LookupError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(
                f"no frame fits the announced array {str(announced)[:80]}, which is number {self._num_taken}; those that came "
                f"have {[len(frame) for frame in self._arrays]} bytes"
            )
        self._num_taken += 1
        return array


def decode(frames: Frames, expected: type[M]) -> M:
    """Decode the frames of one message of type `expected` (a union of messages). Raises ProtocolError."""
    return Decoder(expected).decode(frames)


def _in_one_line(error: Exception) -> str:
    """Without the line breaks with which a peer could write lines of its own into the log."""
    return str(error)[:MAX_COMPLAINT_CHARACTERS].encode("unicode_escape").decode()


def pack(message: msgspec.Struct) -> bytes:
    """Return a message as one byte string, for storage."""
    return msgspec.msgpack.encode(encode(message))


def unpack(packed: bytes, expected: type[M]) -> M:
    """Undo `pack`. Raises ProtocolError."""
    return decode(msgspec.msgpack.decode(packed, type=list[bytes]), expected)
