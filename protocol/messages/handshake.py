"""Handshake messages: the learner's first message, its answer, the heartbeat, and the probes of a doctor.

A doctor probes a server without becoming its learner: what runs there, and whether a transport works.
"""

import os
import socket
import uuid
from typing import Annotated

import msgspec

from protocol.messages.parts import Message, Name, Version
from protocol.messages.push import Rendezvous

PROTOCOL_VERSION = 11
MAX_REPLICAS = 1024
MAX_TRIAL_BYTES = 256 << 20


class ModelFingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Properties that must match, so that token ids and tensors mean the same."""

    architecture: Name
    size: Name
    """Number of layers and width, as in "24 layers of width 896"."""
    vocab_size: int
    tokenizer_hash: Name
    """First 16 hex digits of a SHA-256 over the tokenizer's files."""


def new_learner_id() -> str:
    """Return a unique name of this learner process: host, process id, random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class Hello(Message, omit_defaults=True):  # lets a server of another protocol version read the version
    """First message of a learner, repeated until the server answers."""

    run: Name
    protocol_version: int
    model: ModelFingerprint
    learner: Name = ""
    """Name of the sending process, from `new_learner_id`. It prevents two processes of one run from taking the
    server from each other. Empty: a learner before protocol version 8, which must still receive the
    version error."""
    only_scores: bool = False
    """Whether the run only requests Scores of the server's own model, a frozen reference. Only the tokenizer
    must then match, and the server's vocabulary may not be smaller."""


class RoutingShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers that describe the routed experts of a mixture-of-experts model."""

    num_layers: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    """Number of all layers, dense ones included."""
    num_experts: Annotated[int, msgspec.Meta(gt=0, le=1 << 15)]
    num_per_token: Annotated[int, msgspec.Meta(gt=0, lt=1 << 15)]

    @property
    def bytes_per_token(self) -> int:
        """Number of bytes of one token's routed experts on the wire and in the ledger."""
        return self.num_layers * self.num_per_token * (1 if self.num_experts <= 256 else 2)

    def __str__(self) -> str:
        return f"{self.num_per_token} of {self.num_experts} experts in {self.num_layers} layers"


class Welcome(Message, omit_defaults=True):
    """Acceptance of the run, with the server's properties."""

    server_id: str
    """Id of the weights of a run on the server. It changes when the server or its engine starts, and when a
    run gets the free server. The weights and the running groups are then lost."""
    policy_version: Version | None
    """Version of the weights. None before the first weight sync."""
    num_workers: int
    dtype: str
    transports: list[str]
    """Transports that a weight sync may use, as seen from the workers: "tcp", or with a version that both sides
    must share, "nccl 2.29.7"."""
    devices: list[str]
    """Device of each worker: "cpu" or "<host>/<id of the GPU>"."""
    max_model_len: int
    max_concurrent_sequences: int
    is_untouched: bool
    """True if no weights were ever synced. The server then scores with the model's own weights, under no
    version."""
    num_replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)] = 1
    """Number of copies of the model, each with its share of the workers. vLLM chooses the replica for a
    group. A Score names its replica by number."""
    max_lora_rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    """Maximum rank of a LoRA adapter that a weight sync may bring separately. 0: only full weights."""
    quantization: Name = ""
    """What the server quantizes: weights, the KV cache. It samples from a policy that differs from the learner's
    accordingly, and returns the logprobs of that policy. Empty: nothing."""
    model_digest: Name = ""
    """Digest of the weights in the server's model files (model_digest.py). Empty: unknown."""
    experts: RoutingShape | None = None
    """Shape of the routed experts that the server can return with the tokens. None: it returns none."""


class Refused(Message, omit_defaults=True):  # lets a learner of another protocol version read the reason
    """Refusal of a run. `reason` names the values of both sides and the remedy."""

    reason: str
    is_busy: bool = False
    """True if the refusal is temporary, because another learner has the server. A later Hello may succeed."""
    free_in_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Time until the server is free, unless its learner reconnects, in seconds. None: unknown."""


class Pulse(Message):
    """Heartbeat of the server with its state, sent every 0.4 s."""

    server_id: str
    policy_version: Version | None
    groups_running: int
    groups_unacked: int
    tokens_generated: int
    idle_s: float
    """Seconds since the start of the server in which no group was running."""
    is_draining: bool = False
    """True if the server shuts down: it finishes started work, accepts no more, and then exits. The learner
    answers with a Farewell."""


class Farewell(Message):
    """Announcement that the learner requests nothing more from this server.

    All its requests precede this message.
    """

    is_over: bool = False
    """Whether the run is over for this server, which frees it for another run at once. Otherwise, the learner
    answers a draining server: it still takes what it has requested, and the run may return."""


class Probe(Message):
    """Request for a server's state.

    The server answers on every connection that it accepts, also while it serves a run.
    """

    probe_id: Name


class ServerInfo(Message, omit_defaults=True):  # lets a doctor of another protocol version read the version
    """State of a server, as the answer to a Probe."""

    probe_id: Name
    protocol_version: int
    package_version: Name
    clock_s: float
    """Server clock at the time of the answer, in seconds since 1970."""
    run: Name | None
    """Run that the server serves."""
    model: ModelFingerprint
    dtype: Name
    transports: list[Name]
    devices: list[Name]
    """Device of each worker, as in Welcome."""
    quantization: Name = ""
    """What the server quantizes, as in Welcome."""


class Trial(Message):
    """Request to join the doctor's collective as rank 1, receive bytes, and leave."""

    trial_id: Name
    rendezvous: Rendezvous
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_TRIAL_BYTES)]


class TrialResult(Message):
    """Result of a Trial: the duration `receive_s`, or `error` with the reason."""

    trial_id: Name
    receive_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    error: str | None = None
