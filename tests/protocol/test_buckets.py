"""The memory of buckets: lent again when nothing refers to it, and not before; and manifests with an adapter."""

import pytest
import torch

from protocol.messages import AdapterSpec
from protocol.weights.buckets import BucketMemory, make_manifest

CPU = torch.device("cpu")


def memory_of(num_floats: int) -> BucketMemory:
    return BucketMemory(make_manifest([("weight", torch.zeros(num_floats))], torch.float32, 1 << 20), CPU)


def test_memory_is_lent_again_with_the_last_view_of_it_and_not_before() -> None:
    memory = memory_of(1 << 20)
    buffer = memory.lend(4 << 20)
    buffer.fill_(7)
    address, view = buffer.data_ptr(), buffer[8:16].view(torch.float32).view(2, 1)
    del buffer
    other = memory.lend(4 << 20)
    assert other.data_ptr() != address
    other.fill_(1)
    assert view.view(torch.uint8).eq(7).all()
    del view
    assert memory.lend(1 << 20).data_ptr() == address


def test_there_is_room_for_two_buckets_or_the_largest_tensor_and_what_comes_back_is_room_again() -> None:
    tensors = [(f"weight {index}", torch.zeros(256)) for index in range(5)]
    memory = BucketMemory(make_manifest(tensors, torch.float32, 1024), CPU)
    first, second = memory.lend(1024), memory.lend(1024)
    first.fill_(1)
    second.fill_(2)
    assert first.eq(1).all() and second.eq(2).all()
    assert memory.has_room(256) and not memory.has_room(1024)
    assert memory.lend(1024).fill_(3).eq(3).all()  # beyond the room it is fresh memory
    del first
    assert memory.has_room(1024)


def test_a_loan_has_the_bytes_asked_for_and_may_outlive_the_memory_it_came_from() -> None:
    memory = memory_of(1000)
    buffer = memory.lend(10)
    del memory
    buffer.fill_(3)
    assert buffer.tolist() == [3] * 10


def test_later_syncs_of_a_session_carry_the_last_tensors_where_those_are_an_adapter() -> None:
    tensors = [(name, torch.zeros(4)) for name in ("frozen", "more", "a", "b")]
    whole = make_manifest(tensors, torch.float32, 1 << 20)
    assert whole.of_later_syncs() == whole and not whole.is_adapter_alone and not whole.adapter_names
    first = make_manifest(tensors, torch.float32, 1 << 20, adapter=AdapterSpec(rank=2, num_tensors=2))
    later = first.of_later_syncs()
    assert first.adapter_names == later.adapter_names == {"a", "b"}
    assert [spec.name for spec in later.tensors] == ["a", "b"]
    assert later.is_adapter_alone and not first.is_adapter_alone and later.of_later_syncs() == later


def test_a_manifest_with_more_adapter_than_tensors_or_changes_of_an_adapter_is_malformed() -> None:
    tensors = [("a", torch.zeros(4))]
    with pytest.raises(ValueError, match="the adapter has 2 of 1 tensors"):
        make_manifest(tensors, torch.float32, 1 << 20, adapter=AdapterSpec(rank=2, num_tensors=2))
    with pytest.raises(ValueError, match="is delta, expected dense"):
        make_manifest(tensors, torch.float32, 1 << 20, "delta", AdapterSpec(rank=2, num_tensors=1))


def test_an_empty_bucket_needs_no_memory() -> None:
    assert len(memory_of(0).lend(0)) == 0
