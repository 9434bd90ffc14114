"""Messages of a weight sync: the weights, the rendezvous and the progress."""

from typing import Annotated, Literal

import msgspec

from protocol.messages.parts import Message, Name, Size, Version

TENSOR_DTYPES = frozenset(
    {"float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}
)
"""Dtypes by their names in torch. Floating-point tensors travel as float32 or bfloat16."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensor of the model: its checkpoint name, shape and dtype on the wire."""

    name: str
    shape: tuple[Size, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in TENSOR_DTYPES:
            raise ValueError(
                f"the dtype of {self.name[:100]} is {self.dtype[:20]}, expected one of {sorted(TENSOR_DTYPES)}"
            )


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensors of a weight sync in the order of their bytes, layer by layer."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: Size
    wire: Literal["dense", "delta"] = "dense"
    """Encoding of the weights. dense: all bytes; delta: changes since the last weight sync of the session."""


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Meeting point of the ranks of one session, as one server sees it.

    The learner is rank 0. The workers of all servers of the session follow, server by server.
    """

    transport: Name
    """Name in the registry of transports."""
    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    world_size: int
    first_rank: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Rank of the server's first worker."""
    num_workers: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Number of the server's workers."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    secret: bytes | None = None
    """Secret by which the transport admits a rank, so it travels only here. None if the transport has none."""


class PushBegin(Message):
    """Start of a weight sync.

    `rendezvous` and `manifest` are set only in the first weight sync of a session.
    """

    session: Name
    version: Version
    rendezvous: Rendezvous | None = None
    manifest: Manifest | None = None


class PushReady(Message):
    """Signal that the workers are about to receive.

    Generation is paused by then, unless the server receives weights during generation.
    """

    session: Name
    version: Version


class PushDone(Message):
    """Signal that the server generates with the new version.

    `checksum` is that of the bytes, which all workers have verified.
    """

    session: Name
    version: Version
    checksum: str
    pause_s: float
    receive_s: float
    load_s: float
    stall_s: float
    """Seconds without generation: pause, load and resume, and receive if generation is paused for it."""


class PushFailed(Message):
    """Failure of a weight sync.

    If `weights_intact`, the server continues with the old weights. Otherwise, it waits for a resend.
    """

    session: Name
    version: Version
    state: str
    message: str
    weights_intact: bool
    retryable: bool = True
    """False if the received weights are not all that the server's model has, because a resend would fail
    too."""
    interrupted: bool = False
    """Whether the transfer broke off, perhaps at another rank. False: this server has failed."""


class PushAbort(Message):
    """Abandonment of a session by the learner. The server leaves the session."""

    session: Name
