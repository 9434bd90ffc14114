"""Encoding of messages as ZeroMQ frames, and decoding.

A message is multipart: one msgpack header, then one raw little-endian frame per array, in the order of the
header. The header gives the dtype of each frame and its length, or its shape if it is not flat.
Invariant: nothing is used before the frames match the header.
"""

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, get_args

import msgspec
import numpy as np

from protocol.errors import ProtocolError
from protocol.messages import DTYPES

M = TypeVar("M")
Frames = Sequence[Any]
"""Frames of a message: bytes, or frames as received by ZeroMQ, whose arrays then need no copy."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_DIMENSIONS = 3
"""Maximum number of dimensions of an array: routed experts have a token, a layer and a rank of the choice."""
MAX_DETAIL_CHARACTERS = 300
"""Maximum length of the detail in a decoding error, which may quote megabytes of input."""


def encode(message: msgspec.Struct) -> list[bytes]:
    """Return the frames: the header, then one per array in the header's order."""
    frames = [b""]

    def announce(array: Any) -> tuple[int, str, int | tuple[int, ...]]:
        if not isinstance(array, np.ndarray):
            raise NotImplementedError(f"cannot encode {type(array).__name__}")
        frames.append(array.tobytes())
        return len(frames) - 2, NAMES[array.dtype], len(array) if array.ndim == 1 else array.shape

    frames[0] = msgspec.msgpack.encode(message, enc_hook=announce)
    return frames


class Decoder(Generic[M]):
    """Decoder of frames into messages of type `expected`, a union of messages.

    It is not thread-safe.
    """

    def __init__(self, expected: type[M]) -> None:
        # Created once: creating a decoder takes half as long as decoding a group.
        self._header = msgspec.msgpack.Decoder(expected, dec_hook=self._take)
        self._arrays: Frames = ()
        self._num_taken = 0

    def decode(self, frames: Frames) -> M:
        """Return the message in the frames.

        Raises:
            ProtocolError: The header is no such message, or the frames differ from what it announces.
        """
        if not frames:
            raise ProtocolError("received a message without frames; expected a msgpack header")
        self._arrays, self._num_taken = frames[1:], 0
        try:
            message = self._header.decode(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a valid message: {_in_one_line(error)}") from error
        finally:
            self._arrays = ()
        if (num_announced := self._num_taken) != len(frames) - 1:
            raise ProtocolError(f"received {len(frames) - 1} array frames, but the header announces {num_announced}")
        return message

    def _take(self, _: type, announced: Any) -> np.ndarray:
        """Return the array that the header announces.

        For msgspec, a ValueError or TypeError from here means that the header is wrong.
        """
        index, name, size = announced
        shape = size if isinstance(size, list) else [size]
        try:
            array = np.frombuffer(self._arrays[index], DTYPES[name])
            # The bounds come first: a product of many factors would take minutes.
            fits = index == self._num_taken and len(shape) <= MAX_DIMENSIONS
            fits = fits and all(type(length) is int and 0 <= length < 1 << 31 for length in shape)
            fits = fits and math.prod(shape) == len(array)
            array = array.reshape(shape) if fits else array
        except (LookupError, TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(
                f"no frame fits the announced array {str(announced)[:80]}, number {self._num_taken}; the received "
                f"frames have {[len(frame) for frame in self._arrays]} bytes"
            )
        self._num_taken += 1
        return array


def decode(frames: Frames, expected: type[M]) -> M:
    """Decode the frames of one message of type `expected`, a union of messages.

    Raises:
        ProtocolError: They are not such a message.
    """
    return Decoder(expected).decode(frames)


def _in_one_line(error: Exception) -> str:
    """Escape line breaks, with which a peer could forge lines of the log."""
    return str(error)[:MAX_DETAIL_CHARACTERS].encode("unicode_escape").decode()


def pack(message: msgspec.Struct) -> bytes:
    """Return a message as one byte string, for storage."""
    return msgspec.msgpack.encode(encode(message))


def unpack(packed: bytes, expected: type[M]) -> M:
    """Undo `pack`.

    Raises:
        ProtocolError: The bytes are not the frames of a message of type `expected`.
    """
    try:
        frames = msgspec.msgpack.decode(packed, type=list[bytes])
    except msgspec.DecodeError as error:
        names = " or ".join(kind.__name__ for kind in get_args(expected) or (expected,))
        raise ProtocolError(
            f"{len(packed)} stored bytes are not a message: {_in_one_line(error)}. Expected the frames of {names}. "
            "Resume with the version of Slipstream that stored them, or restore the run directory from a copy"
        ) from error
    return decode(frames, expected)
