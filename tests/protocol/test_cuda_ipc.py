"""Broadcasts within one GPU, with the GPU's memory scripted: handles arrive whole, and rank 0 waits for the copies."""

import ctypes
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from protocol.errors import PushError
from protocol.transports import cuda_ipc
from protocol.transports.cuda_ipc import (
    HEADER_BYTES,
    MAX_OPEN_STORAGES,
    GpuMemory,
    TensorHandle,
    decode_handle,
    encode_handle,
    has_expandable_segments,
)
from protocol.weights.buckets import ALIGNMENT_BYTES, SPAN_BYTES, make_manifest, split_into_buckets
from protocol.weights.dense import NUM_BUFFERS, receive_weights, send_weights
from tests.protocol.local_ranks import Waiting, broadcast, joined, zeros

HANDLE = TensorHandle(
    allocation=bytes(range(66)), storage_bytes=4096, storage_offset_bytes=512, ref_counter=b"/torch_1_2",
    ref_counter_offset=3, event=bytes(64), event_sync_required=True, offset_bytes=96, num_bytes=4000,
)  # fmt: skip


class ScriptedMemory:
    """The memory of a GPU that all ranks share: what was lent can be opened by its number."""

    def __init__(self) -> None:
        self.storages: list[torch.Tensor] = []
        self.calls: list[tuple] = []
        self.num_waits = 0
        self._queued: dict[int, threading.Event] = {}

    def __call__(self, device: torch.device) -> "ScriptedMemory":
        return self

    def lend(self, tensor: torch.Tensor) -> TensorHandle:
        size = tensor.untyped_storage().nbytes()
        self.calls.append(("lend", len(self.storages)))
        # The same memory but no reference to it: a loan does not keep the lender's tensor.
        memory = (ctypes.c_uint8 * size).from_address(tensor.untyped_storage().data_ptr())
        self.storages.append(torch.frombuffer(memory, dtype=torch.uint8))
        return msgspec.structs.replace(
            HANDLE, allocation=bytes([len(self.storages) - 1]), storage_bytes=size,
            offset_bytes=tensor.storage_offset(), num_bytes=tensor.nbytes,
        )  # fmt: skip

    def open(self, handle: TensorHandle) -> torch.Tensor:
        self.calls.append(("open", handle.allocation[0]))
        return self.storages[handle.allocation[0]]

    def take_back(self, handle: TensorHandle) -> None:
        self.calls.append(("take back", handle.allocation[0]))

    def mark(self) -> "Queued":
        """Each thread has a stream of its own, on which nothing is queued unless the test has said so."""
        self.num_waits += 1
        return Queued(self._queued.get(threading.get_ident(), DONE))

    def queue(self) -> threading.Event:
        """From now on this thread's stream has work that goes on until the event is set."""
        self._queued[threading.get_ident()] = threading.Event()
        return self._queued[threading.get_ident()]

    def synchronize(self) -> None:
        self.num_waits += 1

    def collect(self) -> None:
        self.calls.append(("collect",))


DONE = threading.Event()
DONE.set()


class Queued:
    """An event of CUDA: the work that one stream had when it was made."""

    def __init__(self, done: threading.Event) -> None:
        self._done = done

    def synchronize(self) -> None:
        assert self._done.wait(60)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ScriptedMemory:
    scripted = ScriptedMemory()
    monkeypatch.setattr(cuda_ipc, "GpuMemory", scripted)
    return scripted


def bucket(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_loan_is_not_ordered_after_the_stream_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, lent_on = ["the stream that trains"], list[str]()

    @contextmanager
    def selected(stream: str) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    def share_cuda() -> tuple:
        lent_on.append(streams[-1])  # where torch records the event that the borrower waits for
        return 0, bytes(66), 4096, 0, b"/torch_1_2", 3, bytes(64), True

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "an idle stream")
    monkeypatch.setattr(torch.cuda, "stream", selected)
    storage = SimpleNamespace(_share_cuda_=share_cuda)
    tensor: Any = SimpleNamespace(untyped_storage=lambda: storage, storage_offset=lambda: 0, nbytes=4000)
    assert GpuMemory(torch.device("cuda")).lend(tensor).num_bytes == 4000 and lent_on == ["an idle stream"]


def test_every_rank_gets_the_bytes_of_rank_0_and_a_storage_is_lent_and_opened_once(memory: ScriptedMemory) -> None:
    with joined(2, "ipc") as ranks:
        first, second = bucket(1000, seed=0), bucket(500, seed=1)
        for sent in (first, second, first[100:300], second[:0], first):
            broadcast(ranks, sent)
        assert memory.num_waits == 5 * len(ranks) + 5 * 2  # for what each has queued before, and for each copy
        assert Counter(memory.calls) == Counter(
            {("collect",): 2, ("lend", 0): 1, ("lend", 1): 1, ("open", 0): 2, ("open", 1): 2}
        )
    assert memory.calls.count(("take back", 0)) == memory.calls.count(("take back", 1)) == 1


def test_new_storages_are_lent_again_and_only_a_few_stay_open(memory: ScriptedMemory) -> None:
    with joined(transport="ipc") as ranks:
        for seed in range(3 * MAX_OPEN_STORAGES):
            broadcast(ranks, bucket(64, seed))
        assert len(ranks[1]._opened) == MAX_OPEN_STORAGES  # type: ignore[attr-defined]
        assert len(ranks[0]._lent) <= 2  # type: ignore[attr-defined]
        assert [call[0] for call in memory.calls].count("lend") == 3 * MAX_OPEN_STORAGES


def test_the_buffers_of_a_push_are_opened_once(memory: ScriptedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although each tensor is large enough to be sent in place."""
    monkeypatch.setitem(SPAN_BYTES, "cpu", 4096)
    tensors = [(f"layer {index}", torch.randn(1024)) for index in range(32)]
    manifest = make_manifest(tensors, torch.float32, 4096)
    with joined(transport="ipc") as (learner, worker), ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(lambda: list(receive_weights(worker, manifest)))
        sent = send_weights(learner, split_into_buckets(manifest), tensors)
        assert len(receiving.result()) == 32 and sent.num_bytes == 32 * (4096 + ALIGNMENT_BYTES)  # in 64 broadcasts
    assert [call[0] for call in memory.calls].count("open") == NUM_BUFFERS + 1 == MAX_OPEN_STORAGES


def test_a_buffer_is_written_only_after_queued_work_of_its_callers_stream(memory: ScriptedMemory) -> None:
    """Such are the copies into vLLM's weights of the bucket that lay there before, on a stream of vLLM's own."""
    buffer, sent = torch.full((64,), 7, dtype=torch.uint8), bucket(64, seed=0)
    with joined(transport="ipc") as (learner, worker):
        loaded = memory.queue()
        learners_side, workers_side = Waiting(lambda: learner.broadcast(sent)), Waiting(worker.start_broadcast(buffer))
        assert not workers_side.ends_promptly(0.5)
        assert set(buffer.tolist()) == {7}
        loaded.set()
        assert workers_side.ends_promptly() and learners_side.ends_promptly()
    assert torch.equal(buffer, sent)


@pytest.mark.usefixtures("memory")
def test_several_broadcasts_can_be_in_flight() -> None:
    sent, received = [bucket(64, seed) for seed in range(3)], [zeros(64) for _ in range(3)]
    with joined(transport="ipc") as (learner, worker):
        waits = [learner.start_broadcast(tensor) for tensor in sent]
        waits += [worker.start_broadcast(buffer) for buffer in received]
        for wait in waits:
            wait()
        assert all(torch.equal(*pair) for pair in zip(sent, received, strict=True))
        under_way = [learner.start_broadcast(tensor) for tensor in sent]
        learner.close()
        for wait in under_way:
            with pytest.raises(PushError):
                wait()
        with pytest.raises(PushError, match="is closed"):
            learner.start_broadcast(sent[0])


@pytest.mark.usefixtures("memory")
def test_rank_0_returns_only_when_every_rank_has_copied() -> None:
    with joined(2, "ipc") as (learner, *workers):
        learners_side = Waiting(lambda: learner.broadcast(bucket(64, seed=0)))
        ready = Waiting(lambda: workers[0].broadcast(zeros(64)))
        for waiting in (learners_side, ready):
            assert not waiting.ends_promptly(0.3)
        workers[1].broadcast(zeros(64))
        assert learners_side.ends_promptly() and not learners_side.error


@pytest.mark.usefixtures("memory")
def test_a_rank_that_expects_another_size_ends_the_broadcast_of_all() -> None:
    with joined(transport="ipc") as (learner, worker):
        waiting = Waiting(lambda: learner.broadcast(bucket(64, seed=0)))
        with pytest.raises(PushError, match="rank 0 broadcasts 64 bytes, rank 1 expects 65"):
            worker.broadcast(zeros(65))
        assert waiting.ends_promptly() and waiting.error


def test_abort_wakes_rank_0_and_revokes_its_loans(memory: ScriptedMemory) -> None:
    with joined(transport="ipc") as (learner, _):
        waiting = Waiting(lambda: learner.broadcast(bucket(64, seed=0)))
        assert not waiting.ends_promptly(0.3)
        learner.abort()
        assert waiting.ends_promptly() and waiting.error
        learner.close()
        learner.close()
        assert memory.calls == [("collect",), ("lend", 0), ("take back", 0), ("collect",), ("collect",)]


@pytest.mark.usefixtures("memory")
def test_a_failed_broadcast_frees_its_memory_without_garbage_collection() -> None:
    def fail() -> weakref.ref[torch.Tensor]:
        sent = bucket(64, seed=0)
        with suppress(PushError):
            learner.broadcast(sent)
            raise AssertionError("it has not failed")
        return weakref.ref(sent)

    with joined(transport="ipc") as (learner, worker):
        worker.abort()
        gc.disable()
        try:
            sent = fail()
            learner.close()
            assert sent() is None
        finally:
            gc.enable()


# --- handles ---------------------------------------------------------------------------------------------------------


def test_a_handle_arrives_as_it_was_sent() -> None:
    header = encode_handle(HANDLE)
    assert (header.shape, header.dtype) == ((HEADER_BYTES,), torch.uint8)
    assert decode_handle(header) == HANDLE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"allocation": "text"}, r"Expected `bytes`, got `str` - at `\$.allocation`"),
        ({"storage_bytes": -1}, r"Expected `int` >= 0 - at `\$.storage_bytes`"),
        ({"event_sync_required": 1}, "Expected `bool`, got `int`"),
        ({"offset_bytes": 97}, "4000 bytes at offset 97 exceed a storage of 4096 bytes"),
        ({"function": "os.system"}, "unknown field `function`"),
    ],
)
def test_a_malformed_handle_is_rejected(changes, reason) -> None:
    data = msgspec.msgpack.encode(msgspec.structs.asdict(HANDLE) | changes)
    header = (len(data).to_bytes(2, "little") + data).ljust(HEADER_BYTES, b"\0")
    with pytest.raises(PushError, match=f"not a CUDA handle: .*({reason})"):
        decode_handle(torch.frombuffer(bytearray(header), dtype=torch.uint8))


def test_bytes_that_are_not_a_handle_are_rejected() -> None:
    for header in (zeros(HEADER_BYTES), torch.full((HEADER_BYTES,), 255, dtype=torch.uint8)):
        with pytest.raises(PushError, match="not a CUDA handle"):
            decode_handle(header)


def test_expandable_segments_are_detected_under_both_names() -> None:
    assert has_expandable_segments({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert has_expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"})
    assert not has_expandable_segments({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"})
