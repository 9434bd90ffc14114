"""A push over a real gloo collective: every byte arrives, checksums agree, and failures end in time."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from protocol.errors import PushError
from protocol.weights.buckets import BucketMemory, NamedTensors, make_manifest, split_into_buckets
from protocol.weights.delta import Baseline, receive_changes, send_changes
from protocol.weights.dense import ReceivedBucket, Sent, receive_weights, send_weights
from tests.inference_server.broken_transfer import BitFlippingReceiver
from tests.protocol.local_ranks import CPU, joined


def some_tensors(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("embedding", torch.randn(33, 7, generator=generator)),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.zeros(0, 4)),
        ("positions", torch.arange(9)),
        ("odd", torch.arange(5, dtype=torch.uint8)),
        ("big", torch.randn(1001, 1999, generator=generator)),
        ("transposed", torch.randn(800, 600, generator=generator).T),
        ("last", torch.randn(3, generator=generator)),
    ]


def transfer(tensors: NamedTensors, wire_dtype: torch.dtype, bucket_bytes: int) -> tuple[Sent, list[ReceivedBucket]]:
    """Send in this thread and receive in another."""
    manifest = make_manifest(tensors, wire_dtype, bucket_bytes)
    with joined() as (host, worker), ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(lambda: list(receive_weights(worker, manifest)))
        return send_weights(host, split_into_buckets(manifest), tensors), receiving.result()


def tensors_of(arrived: list[ReceivedBucket]) -> dict[str, torch.Tensor]:
    return {name: tensor for one in arrived for name, tensor in one.bucket.views(one.buffer)}


@pytest.mark.parametrize("bucket_bytes", [1, 2000, 4 << 20, 1 << 30])
def test_every_tensor_arrives_bit_for_bit_for_any_bucket_size(bucket_bytes: int) -> None:
    tensors = some_tensors()
    sent, arrived = transfer(tensors, torch.float32, bucket_bytes)
    assert sent.num_bytes >= sum(tensor.nbytes for _, tensor in tensors)
    assert list(tensors_of(arrived)) == [name for name, _ in tensors]
    for name, tensor in tensors:
        assert torch.equal(tensors_of(arrived)[name], tensor), name
    assert (len(arrived) == 1) == (bucket_bytes == 1 << 30)


def test_large_tensors_are_split_and_floats_that_are_no_buffers_are_cast_to_the_wire_dtype() -> None:
    tensors = [("large", torch.randn(9_000_001)), ("small", torch.ones(3)), ("positions", torch.arange(9))]
    tensors.insert(1, ("router bias", nn.Buffer(5 + torch.randn(7))))
    arrived = tensors_of(transfer(tensors, torch.bfloat16, 1 << 30)[1])
    assert torch.equal(arrived["large"], tensors[0][1].bfloat16())
    assert torch.equal(arrived["router bias"], tensors[1][1])
    assert torch.equal(arrived["small"], torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(arrived["positions"], torch.arange(9))


def test_the_checksum_depends_on_values_and_on_the_bucket_size() -> None:
    changed = some_tensors()
    changed[0][1][0, 0] += 1
    one, other = transfer(some_tensors(), torch.float32, 1 << 20)[0], transfer(changed, torch.float32, 1 << 20)[0]
    assert one.checksum != other.checksum
    assert one.checksum == transfer(some_tensors(), torch.float32, 1 << 20)[0].checksum


class OnlyKept(BucketMemory):
    """Memory with a hard limit."""

    def lend(self, num_bytes: int) -> torch.Tensor:
        give_up_at = time.monotonic() + 60
        while not self.has_room(num_bytes):  # gloo's thread holds received data a moment longer
            assert time.monotonic() < give_up_at
            time.sleep(0.001)
        return super().lend(num_bytes)


def test_a_bucket_waits_for_memory_of_an_oversized_tensor_before_it() -> None:
    tensors = [(f"small {index}", torch.randn(250)) for index in range(9)]
    tensors.insert(4, ("large", torch.randn(900)))
    manifest = make_manifest(tensors, torch.float32, 1024)
    with joined() as (host, worker), ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send_weights, host, split_into_buckets(manifest), tensors)
        arrived = {}
        for one in receive_weights(worker, manifest, OnlyKept(manifest, CPU)):
            arrived |= {name: tensor.clone() for name, tensor in one.bucket.views(one.buffer)}
            del one
        sending.result()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors)


def test_tensors_in_another_order_than_the_manifest_are_rejected() -> None:
    manifest = make_manifest(some_tensors(), torch.float32, 1 << 20)
    with joined() as (host, _), pytest.raises(ValueError, match="expects embedding of shape"):
        send_weights(host, split_into_buckets(manifest), reversed(some_tensors()))


@pytest.mark.parametrize("broadcast_index", [0, 1, 2])
def test_a_flipped_bit_is_found_before_its_bucket_is_passed_on(broadcast_index: int) -> None:
    tensors = [("a", torch.randn(600_000)), ("b", torch.randn(600_000))]
    manifest = make_manifest(tensors, torch.float32, 1 << 20)
    loaded = []
    with joined() as (host, worker), ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send_weights, host, split_into_buckets(manifest), tensors)
        with pytest.raises(PushError, match=r"bucket . of 2 .*checksum"):
            for arrived in receive_weights(BitFlippingReceiver(worker, broadcast_index), manifest):
                loaded.append(arrived.bucket.index)
        assert loaded == ([] if broadcast_index < 2 else [0])
        worker.close()
        sending.exception(60)


def push_changes(pushes: list[list[tuple[str, torch.Tensor]]]) -> tuple[list[Sent], list[dict[str, torch.Tensor]]]:
    manifest = make_manifest(pushes[0], torch.bfloat16, 1 << 20, "delta")
    mine, theirs, sent, arrived = Baseline(), Baseline(), [], []
    with joined() as (host, worker), ThreadPoolExecutor(1) as thread:
        for tensors in pushes:
            receiving = thread.submit(lambda: [*receive_changes(worker, manifest, theirs)])
            sent.append(send_changes(host, split_into_buckets(manifest), tensors, mine))
            arrived.append({name: tensor.clone() for name, tensor in tensors_of(receiving.result()).items()})
    return sent, arrived


def test_deltas_give_every_version_bit_for_bit_with_far_fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first push is dense. The next is compared with it, independent of old padding between tensors."""
    first = [
        ("weight", torch.randn(700, 1000)), ("bias", torch.zeros(7)), ("index", torch.arange(5)),
        ("empty", torch.zeros(0)), ("odd", torch.ones(3)), ("router bias", nn.Buffer(5 + torch.randn(5))),
    ]  # fmt: skip
    dense, _ = transfer(first, torch.bfloat16, 1 << 20)
    empty = torch.empty

    def used_before(*size: int, **options: Any) -> torch.Tensor:
        memory = empty(*size, **options)
        return memory.fill_(165) if memory.dtype == torch.uint8 else memory

    monkeypatch.setattr(torch, "empty", used_before)
    second = [(name, tensor.clone()) for name, tensor in first]
    second[0][1][::50, ::2] *= 1.01
    sent, arrived = push_changes([first, second, second])
    for tensors, got in zip([first, second, second], arrived, strict=True):
        for name, tensor in tensors:
            expected = tensor.bfloat16() if tensor.is_floating_point() and name != "router bias" else tensor
            assert torch.equal(got[name], expected), name
    assert sent[0] == dense
    assert sent[1].num_bytes < sent[0].num_bytes / 30
    assert sent[2].num_bytes < 1000 and sent[2].checksum == sent[1].checksum


def test_deltas_for_another_baseline_are_rejected() -> None:
    first = [("weight", torch.randn(700, 1000))]
    manifest = make_manifest(first, torch.float32, 1 << 20, "delta")
    mine, theirs = Baseline(), Baseline()
    for baseline, byte in ((mine, 0), (theirs, 1)):
        baseline.of(split_into_buckets(manifest)[0])[0] = byte
    with joined() as (host, worker), ThreadPoolExecutor(1) as thread:
        zeros = [("weight", torch.zeros(700, 1000))]
        sending = thread.submit(send_changes, host, split_into_buckets(manifest), zeros, mine)
        with pytest.raises(PushError, match="checksum"):
            list(receive_changes(worker, manifest, theirs))
        sending.result(60)
