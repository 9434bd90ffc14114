"""Who is there: the first message of a learner, its answer, and the server's signs of life."""

from typing import Annotated

import msgspec

from protocol.messages.parts import Message, Name, Version

PROTOCOL_VERSION = 7
MAX_REPLICAS = 1024


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
    num_replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICAS)] = 1
    """Copies of the model, each with its share of the workers. vLLM chooses one for a group; to score, each is asked by its number."""


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
    is_draining: bool = False
    """It was told to end: it finishes what it has begun, takes nothing more on, and is then gone. Answered by a Farewell."""


class Farewell(Message):
    """The learner has heard that the server is draining and asks it for nothing more: all that it has asked came before this."""
