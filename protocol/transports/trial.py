"""A transfer for nothing: whether the ranks of a push would find each other, and how fast bytes go between them.

    send_trial (a doctor, rank 0) ═▶ gloo, tcp ═▶ receive_trial (the server, rank 1)

It goes the way of a push between the same two hosts: to the learner's board, then between free ports,
or on lines to the board's own. Invariant: it takes one
chunk of memory, however much is sent.
"""

import time
from contextlib import closing

import msgspec
import torch

from protocol.errors import PushError
from protocol.messages import Trial
from protocol.transports.group import Collective, Meeting, join_collective

CHUNK_BYTES = 4 << 20
MAX_TRIAL_S = 20.0
"""Longest wait for each step of a trial, whatever its sender says."""
CPU = torch.device("cpu")


def send_trial(meeting: Meeting, trial: Trial) -> Collective:
    """Send; return the group, to be closed once the other side has told that all has come. Raises PushError."""
    collective = meeting.host_collective(trial.trial_id, trial.rendezvous, CPU)
    _transfer(collective, trial.num_bytes)
    return collective


def receive_trial(trial: Trial) -> float:
    """Return the seconds that the bytes took. Raises PushError."""
    rendezvous = trial.rendezvous
    if rendezvous.transport not in ("gloo", "tcp") or rendezvous.world_size != 2:
        raise PushError(
            f"a trial over {rendezvous.transport} with {rendezvous.world_size} ranks came; expected gloo or tcp and 2"
        )
    rendezvous = msgspec.structs.replace(rendezvous, timeout_s=min(rendezvous.timeout_s, MAX_TRIAL_S))
    with closing(join_collective(trial.trial_id, rendezvous, 1, CPU)) as collective:
        return _transfer(collective, trial.num_bytes)


def _transfer(collective: Collective, num_bytes: int) -> float:
    chunk = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
    collective.broadcast(chunk[:1])  # the first one connects
    began_s = time.monotonic()
    for start in range(0, num_bytes, CHUNK_BYTES):
        collective.broadcast(chunk[: num_bytes - start])
    return time.monotonic() - began_s
