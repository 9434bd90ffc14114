"""Building blocks of messages: base classes, and types of the values in them."""

from typing import Annotated, Any

import msgspec
import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "int32": np.dtype("<i4"), "float32": np.dtype("<f4"), "uint8": np.dtype("u1"), "uint16": np.dtype("<u2"),
}  # fmt: skip
"""Dtypes of the arrays in a message, by their names in the header."""

# The bound also excludes NaN, which would disorder an event loop's timers. No other code checks these values
# from peers.
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Name = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
"""Short text of one line, because logs and answers repeat it."""
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


def check_array(array: np.ndarray, dtype: str, field: str) -> None:
    if array.dtype != DTYPES[dtype] or array.ndim != 1:
        raise ValueError(f"{field} must be a flat {dtype} array, got {array.ndim}-d {array.dtype}")


def check_experts(array: np.ndarray, field: str) -> None:
    """Check routed experts: ids by token, layer and rank of the choice."""
    if array.dtype not in (DTYPES["uint8"], DTYPES["uint16"]) or array.ndim != 3:
        raise ValueError(f"{field} must be a uint8 or uint16 array of 3 dimensions, got {array.ndim}-d {array.dtype}")


class Message(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag=True, forbid_unknown_fields=True):
    """Base of all messages: frozen, tagged by class name, without unknown fields."""


class Part(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """Base of the structs that messages consist of."""
