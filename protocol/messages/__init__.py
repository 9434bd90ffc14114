"""All messages on the wire.

    learner ── Hello, Generate, Ack, Cancel, Score, PushBegin, PushAbort, Farewell ──▶ server
    learner ◀── Welcome, Refused, Pulse, Group, GroupFailed, Scores, PushReady, PushDone, PushFailed ── server
    doctor ── Probe, Trial ──▶ server ── ServerInfo, TrialResult ──▶ doctor

Messages are frozen and tagged: codec.py decodes them with one typed decoder per direction, and `match`
dispatches them. Each topic has a file.
Invariant: an invalid array exists on neither side, because arrays are checked when a message is created.
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
    MAX_TRIAL_BYTES,
    PROTOCOL_VERSION,
    Farewell,
    Hello,
    ModelFingerprint,
    Probe,
    Pulse,
    Refused,
    RoutingShape,
    ServerInfo,
    Trial,
    TrialResult,
    Welcome,
    new_learner_id,
)
from protocol.messages.parts import DTYPES, Message, Part
from protocol.messages.push import (
    AdapterSpec,
    Manifest,
    PushAbort,
    PushBegin,
    PushDone,
    PushFailed,
    PushReady,
    Rendezvous,
    TensorSpec,
)

__all__ = [
    "DTYPES",
    "MAX_STOPS",
    "MAX_STOP_LENGTH",
    "MAX_TRIAL_BYTES",
    "PROTOCOL_VERSION",
    "Ack",
    "AdapterSpec",
    "Cancel",
    "Completion",
    "Farewell",
    "Generate",
    "Group",
    "GroupFailed",
    "Hello",
    "LearnerMessage",
    "Manifest",
    "Message",
    "ModelFingerprint",
    "Part",
    "Probe",
    "Pulse",
    "PushAbort",
    "PushBegin",
    "PushDone",
    "PushFailed",
    "PushReady",
    "Refused",
    "Rendezvous",
    "RoutingShape",
    "Sampling",
    "Score",
    "Scores",
    "ServerInfo",
    "ServerMessage",
    "TensorSpec",
    "Trial",
    "TrialResult",
    "Welcome",
    "new_learner_id",
]

LearnerMessage = Hello | Generate | Ack | Cancel | Score | PushBegin | PushAbort | Farewell | Probe | Trial
ServerMessage = (
    Welcome
    | Refused
    | Pulse
    | Group
    | GroupFailed
    | Scores
    | PushReady
    | PushDone
    | PushFailed
    | ServerInfo
    | TrialResult
)
