"""The logic around NCCL against a scripted library: what hangs in it is given up at the deadline and aborted."""

import contextlib
import sys
import threading
import types
from collections.abc import Iterator

import pytest
import torch

from protocol.collective import nccl as nccl_collective
from protocol.collective.group import Meeting, join_collective
from protocol.collective.nccl import NcclCollective, ranks_may_share_a_gpu
from protocol.errors import PushError
from protocol.messages import Rendezvous
from tests.protocol.test_collective import CPU, HOST, Waiting, zeros

UNIQUE_ID = bytes(range(128))


class ScriptedNccl(types.ModuleType):
    """Stands for cupy.cuda.nccl; records the calls. Each of its waits hangs while the event of that name is clear."""

    available = True
    NCCL_UINT8 = 1

    def __init__(self) -> None:
        super().__init__("cupy.cuda.nccl")
        self.calls: list[tuple] = []
        self.version = 22907
        self.may_init, self.may_finish = threading.Event(), threading.Event()
        self.may_init.set()
        self.may_finish.set()
        self.async_error = ""
        self.released = threading.Event()

    def get_unique_id(self) -> bytes:
        return UNIQUE_ID

    def get_version(self) -> int:
        return self.version

    def NcclCommunicator(self, world_size: int, unique_id: bytes, rank: int) -> "Communicator":
        self.calls.append(("init", world_size, unique_id, rank))
        self.may_init.wait()
        return Communicator(self)


class Communicator:
    def __init__(self, nccl: ScriptedNccl) -> None:
        self._nccl = nccl

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        self._nccl.calls.append(("broadcast", source, target, count, dtype, root, stream))

    def check_async_error(self) -> None:
        if self._nccl.async_error:
            raise RuntimeError(self._nccl.async_error)

    def abort(self) -> None:
        self._nccl.calls.append(("abort",))
        self._nccl.released.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> ScriptedNccl:
    """The scripted library in place of cupy's, and a stream without a GPU."""
    library = ScriptedNccl()
    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl = library  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)

    class Event:
        def query(self) -> bool:
            return library.may_finish.is_set()

    class Stream:
        def __init__(self, device: torch.device) -> None: ...

        @contextlib.contextmanager
        def selected(self) -> Iterator[int]:
            yield 77

        def follow(self, tensor: torch.Tensor) -> None:
            library.calls.append(("follow", tensor.data_ptr()))

        def mark(self) -> Event:
            return Event()

    monkeypatch.setattr(nccl_collective, "SideStream", Stream)
    return library


def formed(timeout_s: float = 60) -> NcclCollective:
    return NcclCollective(UNIQUE_ID, "e1", 1, 2, CPU, timeout_s)


def test_both_sides_join_with_the_id_that_the_rendezvous_carries(nccl: ScriptedNccl) -> None:
    meeting = Meeting(HOST, timeout_s=10)
    rendezvous = meeting.rendezvous(num_workers=1, transport="nccl")
    assert rendezvous.nccl_unique_id == UNIQUE_ID
    worker = Waiting(lambda: join_collective("e1", rendezvous, 1, CPU).close())
    meeting.host_collective("e1", rendezvous, CPU).close()
    assert worker.ends_promptly() and not worker.error
    inits = sorted(call for call in nccl.calls if call[0] == "init")
    assert inits == [("init", 2, UNIQUE_ID, 0), ("init", 2, UNIQUE_ID, 1)]
    meeting.close()


@pytest.mark.parametrize(
    ("transport", "unique_id"), [("nccl", None), ("nccl", b"short"), ("gloo", UNIQUE_ID), ("ipc", UNIQUE_ID)]
)
def test_the_id_goes_with_nccl_and_is_whole(transport, unique_id) -> None:
    with pytest.raises(ValueError, match=f"transport {transport} goes with an NCCL id of"):
        Rendezvous(
            transport=transport, host=HOST, port=1, world_size=2, timeout_s=1, nccl_unique_id=unique_id
        )  # fmt: skip


def test_a_broadcast_waits_for_the_current_stream_and_runs_on_the_side_stream(nccl: ScriptedNccl) -> None:
    collective = formed()
    tensor = zeros(48)
    nccl.calls.clear()
    collective.broadcast(tensor)
    address = tensor.data_ptr()
    assert nccl.calls == [("follow", address), ("broadcast", address, address, 48, nccl.NCCL_UINT8, 0, 77)]


def test_connecting_belongs_to_joining(nccl: ScriptedNccl) -> None:
    formed()
    assert [call[0] for call in nccl.calls] == ["init", "follow", "broadcast"] and nccl.calls[-1][3] == 1


def test_an_init_that_never_returns_ends_at_the_deadline_and_is_aborted_should_it_return(nccl: ScriptedNccl) -> None:
    nccl.may_init.clear()
    meeting = Meeting(HOST, timeout_s=0.3)
    rendezvous = meeting.rendezvous(num_workers=1, transport="nccl")
    worker = Waiting(lambda: join_collective("e1", rendezvous, 1, CPU))
    with pytest.raises(PushError, match=r"of 2 could not form epoch e1 within 0.3 s \(learner.push.timeout_s\)"):
        meeting.host_collective("e1", rendezvous, CPU)
    assert worker.ends_promptly() and "of 2 could not form epoch e1 within 0.3 s" in worker.error
    assert not nccl.released.is_set()
    nccl.may_init.set()
    assert nccl.released.wait(60)
    meeting.close()


def test_an_init_that_fails_names_the_rank_its_device_and_the_reason(
    nccl: ScriptedNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(world_size: int, unique_id: bytes, rank: int) -> None:
        raise RuntimeError("Duplicate GPU detected")

    monkeypatch.setattr(nccl, "NcclCommunicator", refuse)
    with pytest.raises(PushError, match="rank 1 of 2 on cpu could not form epoch e1 over nccl: Duplicate GPU"):
        formed()


def test_a_broadcast_that_never_ends_is_aborted_at_the_deadline(nccl: ScriptedNccl) -> None:
    collective = formed(timeout_s=0.2)
    nccl.may_finish.clear()
    with pytest.raises(PushError, match=r"48 bytes over nccl in epoch e1 did not end within 0.2 s \(learner.push.tim"):
        collective.broadcast(zeros(48))
    assert nccl.calls[-1] == ("abort",)


def test_an_error_that_nccl_notices_ends_the_broadcast_at_once(nccl: ScriptedNccl) -> None:
    collective = formed()
    nccl.may_finish.clear()
    nccl.async_error = "remote process exited"
    with pytest.raises(PushError, match="48 bytes over nccl in epoch e1 failed: remote process exited"):
        collective.broadcast(zeros(48))
    assert nccl.calls[-1] == ("abort",)


@pytest.mark.parametrize("leave", ["abort", "close"])
def test_abort_from_another_thread_wakes_a_broadcast(nccl: ScriptedNccl, leave: str) -> None:
    collective = formed()
    nccl.may_finish.clear()
    waiting = Waiting(lambda: collective.broadcast(zeros(48)))
    while len(nccl.calls) < 5:
        assert waiting.is_waiting()
    getattr(collective, leave)()
    assert waiting.ends_promptly() and "epoch e1 was aborted or closed" in waiting.error
    collective.close()
    assert nccl.calls.count(("abort",)) == 1
    with pytest.raises(PushError, match="aborted or closed"):
        collective.broadcast(zeros(1))


@pytest.mark.parametrize(
    ("version", "switch", "may"),
    [(23003, "1", True), (23207, "1", True), (23002, "1", False), (22907, "1", False), (23003, "0", False)],
)
def test_two_ranks_share_a_gpu_from_nccl_2_30_3_on_if_switched_on(
    nccl: ScriptedNccl, monkeypatch: pytest.MonkeyPatch, version: int, switch: str, may: bool
) -> None:
    nccl.version = version
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", switch)
    assert ranks_may_share_a_gpu() is may


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    meeting = Meeting(HOST, timeout_s=1)
    with pytest.raises(PushError, match=r'pip install "slipstream-rl\[nccl\]"'):
        meeting.rendezvous(num_workers=1, transport="nccl")
    meeting.close()


def test_a_cupy_without_libnccl_is_refused(nccl: ScriptedNccl) -> None:
    nccl.available = False
    with pytest.raises(PushError, match="finds no libnccl"):
        formed()
