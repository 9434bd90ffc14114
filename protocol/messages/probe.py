"""Messages by which a doctor probes a server without becoming its learner.

They check what runs there, and whether a transport works.
"""

from typing import Annotated

import msgspec

from protocol.messages.handshake import ModelFingerprint
from protocol.messages.parts import Message, Name
from protocol.messages.push import Rendezvous

MAX_TRIAL_BYTES = 256 << 20


class Probe(Message):
    """Request for a server's state.

    The server answers on every connection that it accepts, also while it serves a run.
    """

    probe_id: Name


class ServerInfo(Message):
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
