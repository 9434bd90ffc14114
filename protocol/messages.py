"""Every message on the wire.

    learner ── Hello, Generate, Ack, Cancel, Score, PushBegin, PushAbort ──▶ server
    learner ◀── Welcome, Refused, Pulse, Group, GroupFailed, Scores, PushReady, PushDone, PushFailed ── server

Frozen and tagged: one typed decoder per direction tells them apart (codec.py), `match` dispatches them. Arrays are checked
as a message is made, so an invalid one exists on neither side.
"""

from typing import Annotated, Literal

import msgspec
import numpy as np

PROTOCOL_VERSION = 3

DTYPES = {"int32": np.dtype("<i4"), "float32": np.dtype("<f4")}
"""The arrays a message may carry, by the name the header gives them."""

# NaN, which fits no bound, would put an event loop's timers out of order; no other part checks what a peer sends here.
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Name = Annotated[str, msgspec.Meta(max_length=256, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
"""Short and of one line, for it is repeated in logs and answers."""
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


def _check_array(array: np.ndarray, dtype: str, field: str) -> None:
    if array.dtype != DTYPES[dtype] or array.ndim != 1:
        raise ValueError(f"{field} must be a flat {dtype} array, got {array.ndim}-d {array.dtype}")


class Message(msgspec.Struct, frozen=True, kw_only=True, eq=False, tag=True, forbid_unknown_fields=True):
    """Base of all messages: frozen, tagged by class name, unknown fields refused."""


class Part(msgspec.Struct, frozen=True, kw_only=True, eq=False, forbid_unknown_fields=True):
    """Base of the structs that messages are made of."""


# --- handshake ---------------------------------------------------------------------------------------------------


class ModelFingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be equal on both sides for token ids and tensors to mean the same."""

    architecture: Name
    size: Name
    """Layers and width, as in "24 layers of width 896"."""
    vocab_size: int
    tokenizer_hash: Name
    """First 16 hex digits of a SHA-256 over the tokenizer's files."""


class Hello(Message):
    """First message of a learner, repeated until the server answers."""

    run: Name
    protocol_version: int
    model: ModelFingerprint


class Welcome(Message):
    """The server accepts the run and says what it can do."""

    server_id: str
    """New at every start of the server: a changed id means that it has lost its weights and its groups."""
    policy_version: Version | None
    """None until the first push."""
    num_workers: int
    dtype: str
    transports: list[str]
    """What a push may travel by, seen from the workers."""
    devices: list[str]
    """Where each worker computes: "cpu" or "<host>/<id of the GPU>"."""
    max_model_len: int
    max_concurrent_sequences: int
    is_untouched: bool
    """Nothing was ever pushed: the server scores with the model's own weights, under no version."""


class Refused(Message):
    """The handshake failed; `reason` names both sides' values and the remedy."""

    reason: str


class Pulse(Message):
    """Sent by the server every 0.4 s: its state, and the sign that it is alive."""

    server_id: str
    policy_version: Version | None
    groups_running: int
    groups_unacked: int
    tokens_generated: int
    idle_s: float
    """Seconds since the start of the server in which no group was running."""


# --- generation --------------------------------------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the completions of a group are sampled."""

    num_completions: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    """Completion i is sampled with seed + i."""
    stop_token_ids: tuple[int, ...] = ()
    stop: Annotated[tuple[StopString, ...], msgspec.Meta(max_length=MAX_STOPS)] = ()
    """A completion ends with the token that completes one of these texts, and keeps it."""


class Generate(Message):
    """Ask for one group. Sent again with the same id it is neither generated twice nor answered twice on one connection."""

    group_id: Name
    prompt_token_ids: np.ndarray
    sampling: Sampling
    deadline_s: Seconds
    """Longest time without a token once it has had its first. Time in which nothing may be generated does not count."""

    def __post_init__(self) -> None:
        _check_array(self.prompt_token_ids, "int32", "prompt_token_ids")


class Completion(Part):
    """One completion with the logprobs of the policy that sampled it.

    Example: token_ids=[7, 3, 1], behaviour_logprobs=[-0.2, -1.1, -0.1], versions=[(4, 2), (5, 1)], finish_reason="stop":
    two tokens sampled by policy version 4, one by version 5.
    """

    token_ids: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: list[tuple[Version, int]]
    finish_reason: Literal["stop", "length"]

    def __post_init__(self) -> None:
        _check_array(self.token_ids, "int32", "token_ids")
        _check_array(self.behaviour_logprobs, "float32", "behaviour_logprobs")
        num_tokens = len(self.token_ids)
        if len(self.behaviour_logprobs) != num_tokens:
            raise ValueError(f"{num_tokens} token ids but {len(self.behaviour_logprobs)} behaviour logprobs")
        num_covered, fewest = 0, 1
        for _, count in self.versions:  # a group has dozens: any() and sum() would take longer than all other checks
            num_covered, fewest = num_covered + count, min(fewest, count)
        if num_covered != num_tokens or fewest < 1:
            raise ValueError(f"versions {self.versions} do not cover {num_tokens} tokens")

    @property
    def oldest_version(self) -> int:
        return min(version for version, _ in self.versions)


class Group(Message):
    """All completions of one prompt."""

    group_id: Name
    entered_version: int
    """The policy version when the group entered the engine; its prompt's keys and values may be as old."""
    completions: list[Completion]
    server_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """From the request's arrival to the last token. 0: from before a server that says so."""

    @property
    def oldest_version(self) -> int:
        return min(completion.oldest_version for completion in self.completions if completion.versions)


class GroupFailed(Message):
    """The group will not come; sent again only if `retryable`."""

    group_id: Name
    code: Literal["invalid_prompt", "deadline", "engine_error", "not_ready"]
    message: str
    retryable: bool


class Ack(Message):
    """The learner has the groups in its ledger; the server may forget them."""

    group_ids: list[str]


class Cancel(Message):
    """The learner no longer wants these groups."""

    group_ids: list[str]


class Score(Message):
    """Ask for the logprobs the server's policy gives to a fixed token sequence."""

    request_id: Name
    token_ids: np.ndarray
    deadline_s: Seconds

    def __post_init__(self) -> None:
        _check_array(self.token_ids, "int32", "token_ids")


class Scores(Message):
    """`logprobs[i]` belongs to `token_ids[i + 1]`; `error` is set instead when scoring failed.

    The version is None while the server has its model's own weights.
    """

    request_id: Name
    logprobs: np.ndarray
    policy_version: Version | None
    error: str | None = None

    def __post_init__(self) -> None:
        _check_array(self.logprobs, "float32", "logprobs")


# --- weight push -------------------------------------------------------------------------------------------------

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


Transport = Literal["gloo", "nccl", "ipc"]
"""What the bytes of a push travel by: TCP between CPUs, NCCL between GPUs, memory within one GPU."""

NCCL_UNIQUE_ID_BYTES = 128


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the ranks of one epoch meet. The learner is rank 0, the workers of the server are ranks 1..N."""

    transport: Transport
    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    world_size: int
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    nccl_unique_id: bytes | None = None
    """Whoever has it can join an NCCL epoch, so it travels here and nowhere else."""

    def __post_init__(self) -> None:
        expected = NCCL_UNIQUE_ID_BYTES if self.transport == "nccl" else 0
        if len(self.nccl_unique_id or b"") != expected:
            raise ValueError(
                f"the transport {self.transport} goes with an NCCL id of {expected} bytes, got {len(self.nccl_unique_id or b'')}"
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


LearnerMessage = Hello | Generate | Ack | Cancel | Score | PushBegin | PushAbort
ServerMessage = Welcome | Refused | Pulse | Group | GroupFailed | Scores | PushReady | PushDone | PushFailed
