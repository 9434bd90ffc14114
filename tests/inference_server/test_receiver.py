"""A worker's end of the transfer, with a learner that is there in part."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

import protocol.collective.watch
from inference_server.engine.interface import PushOrder
from inference_server.engine.receiver import Receiver
from protocol.collective.group import Meeting
from protocol.errors import PushError
from protocol.weights.buckets import make_manifest

CPU = torch.device("cpu")


def test_a_worker_gives_up_a_push_when_the_learner_is_gone_although_its_connection_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it looks when its host has vanished: the collective alone would wait for a minute."""
    monkeypatch.setattr(protocol.collective.watch, "INTERVAL_S", 0.05)
    manifest = make_manifest([("weight", torch.zeros(8))], torch.float32, 1024, "dense")
    meeting, receiver = Meeting("127.0.0.1", 60.0), Receiver(1, CPU)
    rendezvous = meeting.rendezvous(1, "gloo")
    order = PushOrder(epoch="epoch", version=1, rendezvous=rendezvous, manifest=manifest)
    with closing(meeting), ThreadPoolExecutor(1) as thread:
        joining = thread.submit(meeting.host_collective, "epoch", rendezvous, CPU)
        receiver.join(order)
        with closing(joining.result()):
            meeting.close()
            with pytest.raises(PushError, match=r"the learner at .* is gone .*; the transfer ended in bucket 1 of 1"):
                list(receiver.receive())
            receiver.leave()
