"""Every message on the wire.

    learner ── Hello, Generate, Ack, Cancel, Score, PushBegin, PushAbort, Farewell ──▶ server
    learner ◀── Welcome, Refused, Pulse, Group, GroupFailed, Scores, PushReady, PushDone, PushFailed ── server
    a doctor ── Probe, Trial ──▶ server ── Vitals, TrialEnded ──▶ the doctor

Frozen and tagged: one typed decoder per direction tells them apart (codec.py), `match` dispatches them. Arrays are checked
as a message is made, so an invalid one exists on neither side. One file for each thing that is talked about.
"""

from protocol.messages.generation import (
    MAX_STOP_LENGTH,
    MAX_STOPS,
    Ack,
    Cancel,
    Completion,
    Generate,
    Group,
    GroupFailed,
    Sampling,
    Score,
    Scores,
)
from protocol.messages.handshake import (
    PROTOCOL_VERSION,
    Farewell,
    Hello,
    ModelFingerprint,
    Pulse,
    Refused,
    Welcome,
    new_learner_id,
)
from protocol.messages.parts import DTYPES, Message, Part
from protocol.messages.probe import MAX_TRIAL_BYTES, Probe, Trial, TrialEnded, Vitals
from protocol.messages.push import (
    Manifest,
    PushAbort,
    PushBegin,
    PushDone,
    PushFailed,
    PushReady,
    Rendezvous,
    TensorSpec,
    Transport,
)

__all__ = [
    "DTYPES", "MAX_STOPS", "MAX_STOP_LENGTH", "MAX_TRIAL_BYTES", "PROTOCOL_VERSION", "Ack", "Cancel", "Completion", "Farewell", "Generate",
    "Group", "GroupFailed", "Hello", "LearnerMessage", "Manifest", "Message", "ModelFingerprint", "Part", "Probe", "Pulse", "PushAbort",
    "PushBegin", "PushDone", "PushFailed", "PushReady", "Refused", "Rendezvous", "Sampling", "Score", "Scores", "ServerMessage",
    "TensorSpec", "Transport", "Trial", "TrialEnded", "Vitals", "Welcome", "new_learner_id",
]  # fmt: skip

LearnerMessage = Hello | Generate | Ack | Cancel | Score | PushBegin | PushAbort | Farewell | Probe | Trial
ServerMessage = (
    Welcome | Refused | Pulse | Group | GroupFailed | Scores | PushReady | PushDone | PushFailed | Vitals | TrialEnded
)
