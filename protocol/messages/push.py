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


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapter of a weight sync: the last tensors of the manifest.

    Their names are those of the adapted layers in the checkpoint, with `.lora_A.weight` and `.lora_B.weight`.
    B contains the adapter's scale, so the layer computes W x + B (A x).
    """

    rank: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    num_tensors: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensors of a weight sync in the order of their bytes, layer by layer."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: Size
    wire: Literal["dense", "delta"] = "dense"
    """Encoding of the weights. dense: all bytes; delta: changes since the last weight sync of the session."""
    adapter: AdapterSpec | None = None
    """Adapter that is sent separately from the frozen weights. The first weight sync of the session then
    carries all tensors, and each later one only the adapter's."""

    def __post_init__(self) -> None:
        if self.adapter is None:
            return
        if self.adapter.num_tensors > len(self.tensors):
            raise ValueError(f"the adapter has {self.adapter.num_tensors} of {len(self.tensors)} tensors")
        if self.wire != "dense":
            raise ValueError(f"the encoding of a manifest with an adapter is {self.wire}, expected dense")

    @property
    def adapter_names(self) -> frozenset[str]:
        """Names of the adapter's tensors, if any."""
        num_tensors = 0 if self.adapter is None else self.adapter.num_tensors
        return frozenset(spec.name for spec in self.tensors[len(self.tensors) - num_tensors :])

    @property
    def is_adapter_alone(self) -> bool:
        return self.adapter is not None and self.adapter.num_tensors == len(self.tensors)

    def of_later_syncs(self) -> "Manifest":
        """Return what every weight sync of the session after the first one carries."""
        if self.adapter is None:
            return self
        return msgspec.structs.replace(self, tensors=self.tensors[-self.adapter.num_tensors :])


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
