"""Sessions that end before they were formed, or while they are received: nobody waits for them and nothing of them stays."""

from collections.abc import Callable

import psutil
import pytest
import torch

from inference_server.engine.interface import PushOrder
from inference_server.engine.weight_receiver import Receiver
from learner.servers.sync_session import SyncSession
from protocol.errors import PushError
from protocol.transports.group import RendezvousHost
from protocol.weights.buckets import make_manifest
from tests.protocol.local_ranks import Waiting
from tests.waiting import TIMEOUT_S, until
from tests.watching import WaitingCollective, transfer

CPU = torch.device("cpu")
MANIFEST = make_manifest([("a", torch.zeros(4))], torch.float32, 1 << 20)


@pytest.mark.parametrize("give_up", [SyncSession.abort, SyncSession.close])
def test_a_worker_whose_transport_notices_nothing_is_notified_that_the_learner_gave_up(give_up: Callable) -> None:
    """NCCL within one host: the kernel of a broadcast spins until its communicator is aborted."""
    rendezvous_host = RendezvousHost("127.0.0.1", TIMEOUT_S)
    session = SyncSession("server", MANIFEST, rendezvous_host.rendezvous(1, "tcp"), rendezvous_host, CPU)
    session.collective = WaitingCollective()
    waiting = Waiting(lambda: transfer(session.rendezvous, session.name))
    assert waiting.is_waiting()
    give_up(session)
    assert waiting.ends_promptly(TIMEOUT_S / 2)
    assert (
        f"session {session.name} was canceled: the learner abandoned the session; the transfer failed" in waiting.error
    )
    rendezvous_host.close()


def test_a_receiver_whose_staging_fails_has_left_the_session() -> None:
    """The learner may be gone for good and never tell it to."""
    process = psutil.Process()
    rendezvous_host = RendezvousHost("127.0.0.1", TIMEOUT_S)
    session = SyncSession("server", MANIFEST, rendezvous_host.rendezvous(1, "tcp"), rendezvous_host, CPU)
    receiver = Receiver(0, CPU)
    before = process.num_threads(), process.num_fds()
    receiver.stage(PushOrder(session=session.name, version=1, rendezvous=session.rendezvous, manifest=session.manifest))
    session.collective = session.join()
    assert (process.num_threads(), process.num_fds()) != before
    session.collective.close()
    session.collective = None
    until(lambda: not receiver.is_staging)
    assert isinstance(receiver.failure, PushError)
    # No more than before: a thread that an earlier test has left may end meanwhile.
    until(lambda: process.num_threads() <= before[0] and process.num_fds() <= before[1])
    rendezvous_host.close()
