"""NCCL and CUDA IPC as they are, between two processes; the logic around them is tested without a GPU beside this file."""

import hashlib
import importlib.util
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from protocol.collective.group import Collective, Meeting, join_collective
from protocol.collective.nccl import SHARED_GPU_SWITCH, ranks_may_share_a_gpu
from protocol.collective.transport import offered_transports, own_device_name
from protocol.errors import PushError
from tests.protocol.test_collective import HOST, Waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

NUM_BYTES = 64 << 20
TIMEOUT_S = 30.0


def checksum(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()


def _work(pipe: Any, device: torch.device, num_broadcasts: int, stop: bool) -> None:
    """Be the worker: receive into one buffer, tell what arrived; then stop without closing anything, or leave."""
    collective = join_collective("e1", pipe.recv(), 1, device)
    buffer = torch.empty(NUM_BYTES, dtype=torch.uint8, device=device)
    for _ in range(num_broadcasts):
        collective.broadcast(buffer)
        pipe.send(checksum(buffer))
    if stop:
        os.kill(os.getpid(), signal.SIGSTOP)
    collective.close()


Join = Callable[..., tuple[Collective, Any]]


@pytest.fixture
def join() -> Iterator[Join]:
    """Form an epoch with a worker in a process of its own; give the learner's collective and the worker's pipe."""
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    meetings: list[Meeting] = []

    def form(transport: str, num_broadcasts: int, *, stop: bool = False, timeout_s: float = TIMEOUT_S) -> Any:
        meetings.append(Meeting(HOST, timeout_s))
        rendezvous = meetings[-1].rendezvous(1, transport)  # type: ignore[arg-type]
        ours, theirs = context.Pipe()
        device = torch.device("cuda", 1 if transport == "nccl" and torch.cuda.device_count() > 1 else 0)
        processes.append(context.Process(target=_work, args=(theirs, device, num_broadcasts, stop)))
        processes[-1].start()
        ours.send(rendezvous)
        return meetings[-1].host_collective("e1", rendezvous, torch.device("cuda", 0)), ours

    yield form
    for process in processes:
        process.kill()
        process.join()
    for meeting in meetings:
        meeting.close()


@pytest.fixture(params=["ipc", "nccl"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each transport that this machine can test."""
    if request.param == "nccl":
        if importlib.util.find_spec("cupy") is None:
            pytest.skip('no cupy: pip install "slipstream-rl[nccl]"')
        if torch.cuda.device_count() < 2:
            monkeypatch.setenv(SHARED_GPU_SWITCH, "1")
            if not ranks_may_share_a_gpu():
                pytest.skip("NCCL before 2.30.3 needs two GPUs")
    return request.param


def test_the_bytes_of_rank_0_arrive_in_every_broadcast_of_the_epoch(transport: str, join: Join) -> None:
    learner, worker = join(transport, num_broadcasts=4)
    buffers = [torch.empty(2 * NUM_BYTES, dtype=torch.uint8, device=learner.device) for _ in range(2)]
    for index in range(4):
        part = buffers[index % 2][NUM_BYTES // 2 : NUM_BYTES // 2 + NUM_BYTES]
        part.random_(0, 256)  # still queued when the broadcast begins
        learner.broadcast(part)
        assert worker.recv() == checksum(part)
    learner.close()


def test_a_stopped_worker_ends_the_broadcast_at_the_deadline_and_the_gpu_goes_on(transport: str, join: Join) -> None:
    learner, worker = join(transport, num_broadcasts=1, stop=True, timeout_s=10.0)
    tensor = torch.ones(NUM_BYTES, dtype=torch.uint8, device=learner.device)
    learner.broadcast(tensor)
    worker.recv()
    with pytest.raises(PushError, match=r"learner\.push\.timeout_s"):
        learner.broadcast(tensor)
    learner.close()
    torch.cuda.synchronize()
    assert int(tensor.sum(dtype=torch.int64)) == NUM_BYTES


def test_abort_wakes_a_broadcast_in_another_thread(transport: str, join: Join) -> None:
    learner, worker = join(transport, num_broadcasts=1, stop=True, timeout_s=60.0)
    tensor = torch.ones(NUM_BYTES, dtype=torch.uint8, device=learner.device)
    learner.broadcast(tensor)
    worker.recv()
    waiting = Waiting(lambda: learner.broadcast(tensor))
    assert not waiting.ends_promptly(1.0)
    learner.abort()
    assert waiting.ends_promptly() and waiting.error
    learner.close()
    torch.cuda.synchronize()


def test_failed_epochs_leave_no_memory_on_the_gpu(transport: str, join: Join) -> None:
    def fail() -> None:
        learner, worker = join(transport, num_broadcasts=1, stop=True, timeout_s=60.0)
        tensor = torch.ones(NUM_BYTES, dtype=torch.uint8, device=learner.device)
        learner.broadcast(tensor)
        worker.recv()
        waiting = Waiting(lambda: learner.broadcast(tensor[:1024]))
        assert not waiting.ends_promptly(0.5)
        learner.close()
        assert waiting.ends_promptly()

    fail()
    allocated = torch.cuda.memory_allocated(0)
    fail()
    assert torch.cuda.memory_allocated(0) <= allocated


def test_a_gpu_is_named_by_its_host_and_id_and_offers_ipc() -> None:
    first = own_device_name(torch.device("cuda", 0))
    assert first == own_device_name(torch.device("cuda", 0)) and first.count("/") == 1
    if torch.cuda.device_count() > 1:
        assert first != own_device_name(torch.device("cuda", 1))
    assert {"gloo", "ipc"} <= set(offered_transports())
