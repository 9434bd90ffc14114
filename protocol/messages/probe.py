"""What a doctor asks of a server without becoming its learner: who is there, and whether bytes come through."""

from typing import Annotated

import msgspec

from protocol.messages.handshake import ModelFingerprint
from protocol.messages.parts import Message, Name
from protocol.messages.push import Rendezvous

MAX_TRIAL_BYTES = 256 << 20


class Probe(Message):
    """Who is there? Answered on every connection that the server takes, also while it serves a run."""

    probe_id: Name


class Vitals(Message):
    """What a server says of itself."""

    probe_id: Name
    protocol_version: int
    package_version: Name
    clock_s: float
    """Its clock as it answered, in seconds since 1970."""
    run: Name | None
    """Whom it serves."""
    model: ModelFingerprint
    dtype: Name
    transports: list[Name]
    devices: list[Name]
    """As in Welcome, one for each worker."""


class Trial(Message):
    """Join the asker's collective as rank 1, take so many bytes for nothing, and leave."""

    trial_id: Name
    rendezvous: Rendezvous
    num_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_TRIAL_BYTES)]


class TrialEnded(Message):
    """The bytes came within `receive_s`, or `error` says why not."""

    trial_id: Name
    receive_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    error: str | None = None
