"""Test transfer: whether the ranks of a weight sync can connect, and how fast.

    send_trial (a doctor, rank 0) ═▶ a transport between CPUs ═▶ receive_trial (the server, rank 1)

It uses the path of a weight sync between the same hosts, to the port of the learner's rendezvous store.
Invariant: it takes one chunk of memory, whatever the number of bytes.
"""

import threading
import time
from contextlib import closing

import msgspec
import torch

from protocol.errors import PushError
from protocol.messages import Trial
from protocol.transports.collective import Collective, load_transport
from protocol.transports.group import RendezvousHost, join_collective

CHUNK_BYTES = 4 << 20
MAX_TRIAL_S = 20.0
"""Maximum time of each step of a trial, whatever its sender requests."""
CPU = torch.device("cpu")


def send_trial(rendezvous_host: RendezvousHost, trial: Trial) -> Collective:
    """Send the bytes and return the collective.

    Close the collective once the other side has reported that everything arrived.

    Raises:
        PushError: The transfer fails.
    """
    collective = rendezvous_host.host_collective(trial.trial_id, trial.rendezvous, CPU)
    _transfer(collective, trial.num_bytes)
    return collective


def receive_trial(trial: Trial) -> float:
    """Receive the bytes and return the seconds that they took.

    Raises:
        PushError: The rendezvous is not that of a trial, or the transfer fails or takes more than two steps' time.
    """
    rendezvous = trial.rendezvous
    if load_transport(rendezvous.transport).between_gpus or rendezvous.world_size != 2:
        raise PushError(
            f"received a trial over {rendezvous.transport} with {rendezvous.world_size} ranks; expected a transport "
            "between CPUs, and 2 ranks"
        )
    rendezvous = msgspec.structs.replace(rendezvous, timeout_s=min(rendezvous.timeout_s, MAX_TRIAL_S))
    with closing(join_collective(trial.trial_id, rendezvous, 1, CPU)) as collective:
        overdue = threading.Timer(2 * rendezvous.timeout_s, collective.abort)
        overdue.daemon = True
        overdue.start()
        try:
            return _transfer(collective, trial.num_bytes)
        finally:
            overdue.cancel()


def _transfer(collective: Collective, num_bytes: int) -> float:
    chunk = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
    collective.broadcast(chunk[:1])  # the first broadcast connects
    started_s = time.monotonic()
    for start in range(0, num_bytes, CHUNK_BYTES):
        collective.broadcast(chunk[: num_bytes - start])
    return time.monotonic() - started_s
