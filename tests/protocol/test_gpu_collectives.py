"""NCCL and CUDA IPC as they are, between two processes; the logic around them is tested without a GPU beside this
file."""

import gc
import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from protocol.errors import PushError
from protocol.messages import Manifest, Rendezvous
from protocol.transports.collective import Collective
from protocol.transports.cuda_ipc import GpuMemory, TensorHandle
from protocol.transports.group import RendezvousHost, join_collective, watched
from protocol.transports.nccl import why_not_installed
from protocol.transports.transport import offered_transports, own_device_name
from protocol.weights.buckets import checksum_of, make_manifest, split_into_buckets
from protocol.weights.dense import NUM_BUFFERS, receive_weights, send_weights
from tests.protocol.gpu_transports import require_gpu_transport
from tests.protocol.local_ranks import HOST, Waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

NUM_BYTES = 64 << 20
TIMEOUT_S = 30.0
SESSION = "e1"
LONG_CYCLES = 1 << 31
"""About a second of a GPU."""


def checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()


def _receive_and_stop(pipe: Any, collective: Collective) -> None:
    """Receive once, then stop without closing anything."""
    collective.broadcast(torch.empty(NUM_BYTES, dtype=torch.uint8, device=collective.device))
    pipe.send("received")
    os.kill(os.getpid(), signal.SIGSTOP)


def _load_and_receive(pipe: Any, collective: Collective) -> None:
    """Receive into memory that this thread's stream, one of its own as vLLM's is, has still to copy to the weights."""
    with torch.cuda.stream(torch.cuda.Stream(collective.device)):
        buffer = torch.full((NUM_BYTES,), 7, dtype=torch.uint8, device=collective.device)
        weights = torch.empty_like(buffer)
        torch.cuda._sleep(LONG_CYCLES)
        weights.copy_(buffer)
        collective.start_broadcast(buffer)()
        pipe.send((weights.unique().tolist(), checksum(buffer)))


def _receive_pushes(pipe: Any, collective: Collective, *, manifest: Manifest, num_pushes: int) -> None:
    """Tell what has arrived of each push, and how many storages of the learner were opened until then."""
    opened: list[TensorHandle] = []
    open_one = GpuMemory.open
    GpuMemory.open = lambda memory, handle: opened.append(handle) or open_one(memory, handle)  # type: ignore[assignment,func-returns-value,method-assign]
    for _ in range(num_pushes):
        checksums = [arrived.checksum for arrived in receive_weights(collective, manifest)]
        pipe.send((checksum_of(checksums), len(opened)))


def _wait_watched(pipe: Any, collective: Collective, *, rendezvous: Rendezvous) -> None:
    """Receive what comes, then tell why no more has come."""
    buffer = torch.empty(NUM_BYTES, dtype=torch.uint8, device=collective.device)
    collective.broadcast(buffer)
    pipe.send("first")
    try:
        with watched(collective, rendezvous, SESSION, 1):
            collective.broadcast(buffer)
    except PushError as error:
        pipe.send(str(error))


def _be_worker(pipe: Any, rendezvous: Rendezvous, device: torch.device, work: Callable[..., None], how: dict) -> None:
    collective = join_collective(SESSION, rendezvous, 1, device)
    work(pipe, collective, **how)
    collective.close()


class Sessions:
    """Forms a session with a worker in a process of its own."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self.rendezvous_hosts: list[RendezvousHost] = []

    def join(
        self, transport: str, work: Callable[..., None], *, timeout_s: float = TIMEOUT_S, **how: Any
    ) -> tuple[Collective, Any]:
        """Return the learner's collective and the worker's pipe."""
        self.rendezvous_hosts.append(RendezvousHost(HOST, timeout_s))
        rendezvous = self.rendezvous_hosts[-1].rendezvous(1, transport)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        device = torch.device("cuda", 1 if transport == "nccl" and torch.cuda.device_count() > 1 else 0)
        if work is _wait_watched:
            how["rendezvous"] = rendezvous
        self._processes.append(context.Process(target=_be_worker, args=(theirs, rendezvous, device, work, how)))
        self._processes[-1].start()
        theirs.close()
        return self.rendezvous_hosts[-1].host_collective(SESSION, rendezvous, torch.device("cuda", 0)), ours

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for rendezvous_host in self.rendezvous_hosts:
            rendezvous_host.close()


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    with closing(Sessions()) as sessions:
        yield sessions


def answer(pipe: Any, timeout_s: float = 2 * TIMEOUT_S) -> Any:
    assert pipe.poll(timeout_s), f"the worker has not answered for {timeout_s:g} s"
    return pipe.recv()


@pytest.fixture(params=["ipc", "nccl"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each transport that this machine can test."""
    require_gpu_transport(request.param, monkeypatch)
    return request.param


def test_a_broadcast_comes_after_what_either_sides_own_stream_has_queued(transport: str, sessions: Sessions) -> None:
    learner, worker = sessions.join(transport, _load_and_receive)
    with torch.cuda.stream(torch.cuda.Stream(learner.device)):
        gathered = torch.zeros(2 * NUM_BYTES, dtype=torch.uint8, device=learner.device)[NUM_BYTES // 2 :][:NUM_BYTES]
        torch.cuda._sleep(LONG_CYCLES)
        gathered.random_(0, 256)
        learner.start_broadcast(gathered)()
        assert answer(worker) == ([7], checksum(gathered))
    learner.close()


def test_pushes_arrive_whole_and_hold_the_memory_of_few_buffers(transport: str, sessions: Sessions) -> None:
    tensors = [(f"layer {index}", torch.randn(1 << 21, device="cuda")) for index in range(32)]
    manifest = make_manifest(tensors, torch.bfloat16, 4 << 20)  # buckets of one each
    learner, worker = sessions.join(transport, _receive_pushes, manifest=manifest, num_pushes=8)
    gc.collect()
    allocated = torch.cuda.memory_allocated(0)
    for number in range(8):
        sent = send_weights(learner, split_into_buckets(manifest), tensors)
        arrived, num_opened = answer(worker)
        assert arrived == sent.checksum
        assert number > 0 or num_opened == (NUM_BUFFERS + 1 if transport == "ipc" else 0)
    assert torch.cuda.memory_allocated(0) - allocated <= 2 * NUM_BUFFERS * manifest.bucket_bytes
    learner.close()


def test_a_worker_is_free_soon_after_a_learner_that_lives_has_given_up(transport: str, sessions: Sessions) -> None:
    learner, worker = sessions.join(transport, _wait_watched, timeout_s=10 * TIMEOUT_S)
    learner.broadcast(torch.ones(NUM_BYTES, dtype=torch.uint8, device=learner.device))
    assert answer(worker) == "first"
    time.sleep(2.0)  # so that it is in the broadcast
    sessions.rendezvous_hosts[-1].cancel(SESSION, "the learner gave up")
    learner.abort()
    assert "gave up" in answer(worker, TIMEOUT_S) or transport == "ipc"  # its TCP connections may be first
    learner.close()


def test_a_stopped_worker_ends_the_broadcast_at_the_deadline(transport: str, sessions: Sessions) -> None:
    learner, worker = sessions.join(transport, _receive_and_stop, timeout_s=10.0)
    tensor = torch.ones(NUM_BYTES, dtype=torch.uint8, device=learner.device)
    learner.broadcast(tensor)
    answer(worker)
    with pytest.raises(PushError, match=r"learner\.weight_sync\.timeout_s"):
        learner.broadcast(tensor)
    learner.close()
    torch.cuda.synchronize()
    assert int(tensor.sum(dtype=torch.int64)) == NUM_BYTES


def test_a_close_wakes_a_broadcast_and_leaves_no_memory(transport: str, sessions: Sessions) -> None:
    def fail() -> None:
        learner, worker = sessions.join(transport, _receive_and_stop, timeout_s=60.0)
        tensor = torch.ones(NUM_BYTES, dtype=torch.uint8, device=learner.device)
        learner.broadcast(tensor)
        answer(worker)
        waiting = Waiting(lambda: learner.broadcast(tensor[:1024]))
        assert not waiting.ends_promptly(0.5)
        learner.close()
        assert waiting.ends_promptly() and waiting.error
        torch.cuda.synchronize()

    gc.collect()
    allocated = torch.cuda.memory_allocated(0)
    gc.disable()
    try:
        fail()
        fail()
        assert torch.cuda.memory_allocated(0) <= allocated
    finally:
        gc.enable()


def test_a_gpu_is_named_by_its_host_and_id_and_offers_what_is_installed() -> None:
    first = own_device_name(torch.device("cuda", 0))
    assert first == own_device_name(torch.device("cuda", 0)) and first.count("/") == 1
    if torch.cuda.device_count() > 1:
        assert first != own_device_name(torch.device("cuda", 1))
    assert {entry.partition(" ")[0] for entry in offered_transports()} == {
        "tcp",
        "ipc",
        *(["nccl"] if why_not_installed() is None else []),
    }
