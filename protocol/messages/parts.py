"""What all messages are made of: their bases, and the kinds of values that a peer may send."""

from typing import Annotated

import msgspec
import numpy as np

DTYPES = {"int32": np.dtype("<i4"), "float32": np.dtype("<f4")}
"""The arrays a message may carry, by the name the header gives them."""

# NaN, which fits no bound, would put an event loop's timers out of order; no other part checks what a peer sends here.
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Name = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
"""Short and of one line, for it is repeated in logs and answers."""
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


def check_array(array: np.ndarray, dtype: str, field: str) -> None:
    if array.dtype != DTYPES[dtype] or array.ndim != 1:
        raise ValueError(f"{field} must be a flat {dtype} array, got {array.ndim}-d {array.dtype}")


class Message(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag=True, forbid_unknown_fields=True):
    """Base of all messages: frozen, tagged by class name, unknown fields refused."""


class Part(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """Base of the structs that messages are made of."""
