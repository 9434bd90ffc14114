"""Who is there: the first message of a learner, its answer, and the server's signs of life."""

import os
import socket
import uuid
from typing import Annotated

import msgspec

from protocol.messages.parts import Message, Name, Version

PROTOCOL_VERSION = 8
MAX_REPLICAS = 1024


class ModelFingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must be equal on both sides for token ids and tensors to mean the same."""

    architecture: Name
    size: Name
    """Layers and width, as in "24 layers of width 896"."""
    vocab_size: int
    tokenizer_hash: Name
    """First 16 hex digits of a SHA-256 over the tokenizer's files."""


def new_learner_id() -> str:
    """Return a name for this learner process that no other has: host, process id and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class Hello(Message):
    """First message of a learner, repeated until the server answers."""

    run: Name
    protocol_version: int
    model: ModelFingerprint
    learner: Name = ""
    """The process that speaks, by `new_learner_id`: two of one run must not take the server from each other. Empty only from a
    learner before protocol version 8, which must still be told that its version is another."""


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
    num_replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)] = 1
    """Copies of the model, each with its share of the workers. vLLM chooses one for a group; to score, each is asked by its number."""


class Refused(Message, omit_defaults=True):  # so that a learner of another protocol version can read why
    """The server does not take this run; `reason` names both sides' values and the remedy."""

    reason: str
    is_busy: bool = False
    """For now, because another learner has the server: a later Hello may be answered otherwise."""
    free_in_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """After so long the server is free, unless the learner that has it comes back. None: nobody knows."""


class Pulse(Message):
    """Sent by the server every 0.4 s: its state, and the sign that it is alive."""

    server_id: str
    policy_version: Version | None
    groups_running: int
    groups_unacked: int
    tokens_generated: int
    idle_s: float
    """Seconds since the start of the server in which no group was running."""
    is_draining: bool = False
    """It was told to end: it finishes what it has begun, takes nothing more on, and is then gone. Answered by a Farewell."""


class Farewell(Message):
    """The learner asks this server for nothing more: all that it has asked came before this."""

    is_over: bool = False
    """Whether the run is over here, which frees the server for another run at once. Otherwise the learner has heard that the server is
    draining; it still takes what it has asked for, and the run may come back."""
