"""The receiving side of a transfer, with a partially working learner."""

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch

import protocol.transports.group
from inference_server.engine.interface import PushOrder
from inference_server.engine.weight_receiver import Receiver, SessionMembership, in_host_memory
from protocol.errors import PushError
from protocol.transports.group import RendezvousHost
from protocol.weights.buckets import make_manifest, split_into_buckets
from protocol.weights.delta import Baseline
from protocol.weights.dense import ReceivedBucket

CPU = torch.device("cpu")
NONE: Any = None


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
    kept = in_host_memory({}, arrived)
    assert (kept.bucket, kept.checksum, kept.buffer.device) == (bucket, 7, CPU)
    assert kept.buffer.tolist() == list(range(32)) and kept.buffer.is_pinned() == (device == "cuda")


class OnGpu(torch.Tensor):
    """Tensor in host memory that claims to be on a GPU."""

    device = torch.device("cuda")


def on_gpu(num_bytes: int, value: int) -> torch.Tensor:
    return torch.full((num_bytes,), value, dtype=torch.uint8).as_subclass(OnGpu)


def test_the_buckets_of_a_gpu_take_one_buffer_each_of_their_size_for_all_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest([(str(size), torch.zeros(size)) for size in (300, 200)], torch.float32, 1024)
    buckets, kept, asked = split_into_buckets(manifest), dict[int, torch.Tensor](), list[int]()
    assert len(buckets) == 2

    def empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        asked.append(shape.numel() * dtype.itemsize)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr("inference_server.engine.weight_receiver.empty_in_host_memory", empty)
    for version in (1, 2):
        for bucket in buckets:
            held = in_host_memory(kept, ReceivedBucket(bucket, on_gpu(bucket.num_bytes, version), 7)).buffer
            assert held.data_ptr() == kept[bucket.index].data_ptr() and {*held.tolist()} == {version}
    assert asked == [bucket.num_bytes for bucket in buckets]


def test_a_session_keeps_its_host_memory_and_no_bucket_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest([("weight", torch.zeros(8))], torch.float32, 1024)
    (bucket,) = split_into_buckets(manifest)

    def receive() -> Iterator[ReceivedBucket]:
        arrived = ReceivedBucket(bucket, on_gpu(bucket.num_bytes, 1), 7)
        released = weakref.ref(arrived.buffer)
        yield arrived
        del arrived
        assert released() is None, "its memory is not free for the next bucket"

    receiver = Receiver(0, CPU)
    receiver._member = SessionMembership("session", 1, NONE, NONE, manifest, None, NONE)
    monkeypatch.setattr(receiver, "receive", receive)
    monkeypatch.setattr(
        "inference_server.engine.weight_receiver.empty_in_host_memory",
        lambda shape, dtype: torch.empty(shape, dtype=dtype),
    )
    (first,), (second,) = (list(receiver.receive_in_host_memory()) for _ in range(2))
    assert first.buffer.data_ptr() == second.buffer.data_ptr()
    receiver._member = SessionMembership("session", 1, NONE, NONE, manifest, Baseline(), NONE)
    list(receiver.receive_in_host_memory())
    assert receiver._member.kept == {}, "later deltas are decoded in the baseline"
