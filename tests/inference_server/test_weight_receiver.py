"""The receiving side of a transfer, with a partially working learner."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

import protocol.transports.group
from inference_server.engine.interface import PushOrder
from inference_server.engine.weight_receiver import Receiver, in_host_memory
from protocol.errors import PushError
from protocol.transports.group import RendezvousHost
from protocol.weights.buckets import make_manifest, split_into_buckets
from protocol.weights.dense import ReceivedBucket

CPU = torch.device("cpu")


def test_a_worker_gives_up_a_push_when_the_learner_is_lost_although_its_connection_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This happens when the learner's host vanishes: the collective alone would wait for a minute."""
    monkeypatch.setattr(protocol.transports.group, "WATCH_INTERVAL_S", 0.05)
    manifest = make_manifest([("weight", torch.zeros(8))], torch.float32, 1024, "dense")
    rendezvous_host, receiver = RendezvousHost("127.0.0.1", 60.0), Receiver(0, CPU)
    rendezvous = rendezvous_host.rendezvous(1, "tcp")
    order = PushOrder(session="session", version=1, rendezvous=rendezvous, manifest=manifest)
    with closing(rendezvous_host), ThreadPoolExecutor(1) as thread:
        joining = thread.submit(rendezvous_host.host_collective, "session", rendezvous, CPU)
        receiver.join(order)
        with closing(joining.result()):
            rendezvous_host.close()
            with pytest.raises(PushError, match=r"the learner at .* is gone .*; the transfer failed: bucket 1 of 1"):
                list(receiver.receive())
            receiver.leave()


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")],
        ),
    ],
)
def test_weights_kept_until_a_push_is_complete_use_no_gpu_memory(device: str) -> None:
    (bucket,) = split_into_buckets(make_manifest([("weight", torch.zeros(8))], torch.float32, 1024))
    arrived = ReceivedBucket(bucket, torch.arange(32, dtype=torch.uint8, device=device), 7)
    kept = in_host_memory(arrived)
    assert (kept.bucket, kept.checksum, kept.buffer.device) == (bucket, 7, CPU)
    assert kept.buffer.tolist() == list(range(32)) and kept.buffer.is_pinned() == (device == "cuda")
