"""A push of weights: what travels, where the ranks meet, and how far it has come."""

from typing import Annotated, Literal

import msgspec

from protocol.messages.parts import Message, Name, Size, Version

TENSOR_DTYPES = frozenset(
    {"float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}
)
"""What torch calls them; floating-point tensors travel as float32 or bfloat16."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of the model: its checkpoint name, shape and the dtype it travels in."""

    name: str
    shape: tuple[Size, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in TENSOR_DTYPES:
            raise ValueError(
                f"the dtype of {self.name[:100]} is {self.dtype[:20]}, expected one of {sorted(TENSOR_DTYPES)}"
            )


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tensors of a push in the order of their bytes, layer by layer."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: Size
    wire: Literal["dense", "delta"] = "dense"
    """dense: all bytes; delta: what has changed since the last push of the epoch."""


Transport = Literal["gloo", "tcp", "nccl", "ipc"]
"""What the bytes of a push travel by: between CPUs by gloo or over one port of the learner, NCCL between GPUs, memory within one GPU."""

NCCL_UNIQUE_ID_BYTES = 128
TCP_SECRET_BYTES = 32


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the ranks of one epoch meet. The learner is rank 0, the workers of the server are ranks 1..N."""

    transport: Transport
    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    world_size: int
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    nccl_unique_id: bytes | None = None
    """Whoever has it can join an NCCL epoch, so it travels here and nowhere else."""
    tcp_secret: bytes | None = None
    """Whoever calls for a line of a tcp epoch has to show it."""

    def __post_init__(self) -> None:
        expected = NCCL_UNIQUE_ID_BYTES if self.transport == "nccl" else 0
        if len(self.nccl_unique_id or b"") != expected:
            raise ValueError(
                f"the transport {self.transport} goes with an NCCL id of {expected} bytes, got {len(self.nccl_unique_id or b'')}"
            )
        expected = TCP_SECRET_BYTES if self.transport == "tcp" else 0
        if len(self.tcp_secret or b"") != expected:
            raise ValueError(
                f"the transport {self.transport} goes with a secret of {expected} bytes, got {len(self.tcp_secret or b'')}"
            )


class PushBegin(Message):
    """Start of a push. `rendezvous` and `manifest` come only with the first push of an epoch."""

    epoch: Name
    version: Version
    rendezvous: Rendezvous | None = None
    manifest: Manifest | None = None


class PushReady(Message):
    """Generation is paused and the workers are about to receive."""

    epoch: Name
    version: Version


class PushDone(Message):
    """The server generates with the new version; `checksum` is of the bytes that all its workers have checked."""

    epoch: Name
    version: Version
    checksum: str
    pause_s: float
    receive_s: float
    load_s: float
    stall_s: float
    """Seconds in which nothing was generated: pause + receive + load + resume."""


class PushFailed(Message):
    """The push did not complete. `weights_intact`: the server goes on with the old weights; else it waits for a resend."""

    epoch: Name
    version: Version
    state: str
    message: str
    weights_intact: bool
    retryable: bool = True
    """False if the weights that came are not all that the server's model has, so that a resend would fail too."""


class PushAbort(Message):
    """The learner gives up on an epoch; the server leaves it and forgets its group."""

    epoch: Name
