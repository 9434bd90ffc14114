"""The logic around NCCL against a scripted library: what hangs in it is given up at the deadline and aborted."""

import contextlib
import os
import re
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from protocol.errors import PushError
from protocol.messages import Rendezvous
from protocol.transports import group
from protocol.transports import nccl as nccl_transport
from protocol.transports.collective import RankContext
from protocol.transports.group import join_collective
from protocol.transports.nccl import (
    FAMILY,
    INTERFACE,
    SHARED_GPU_SWITCH,
    NcclCollective,
    ranks_may_share_a_gpu,
    use_interface_of,
    why_not_installed,
)
from protocol.transports.rendezvous import RendezvousStore, SessionStore
from protocol.transports.transport import offered_transports
from protocol.weights.buckets import make_manifest, split_into_buckets
from protocol.weights.dense import receive_weights, send_weights
from tests.protocol.local_ranks import CPU, HOST, Waiting, race_clock, rendezvous_host, zeros
from tests.waiting import until

UNIQUE_ID = bytes(range(128))
TENSORS = [(f"layer {index}", torch.ones(256)) for index in range(3)]
"""One to a bucket of 1024 bytes."""


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
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedNccl]:
    """The scripted library in place of cupy's, and a stream without a GPU."""
    library = ScriptedNccl()
    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl = library  # type: ignore[attr-defined]
    cuda.runtime = types.SimpleNamespace(runtimeGetVersion=lambda: 13000, driverGetVersion=lambda: 13000)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)

    class Event:
        def query(self) -> bool:
            return library.may_finish.is_set()

    class Stream:
        """Work queued on it waits for what it was told to wait for; each thread has one of its own, as torch has it."""

        cuda_stream = 77

        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            library.calls.append((f"{self.name} waits for", other.name))

        def record_event(self) -> Event:
            return Event()

        def keep(self, tensor: torch.Tensor) -> None:
            library.calls.append((f"{self.name} keeps", tensor.data_ptr()))

    def own_stream(_: object) -> Stream:
        return Stream(f"stream of {threading.current_thread().name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", own_stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: stream.keep(tensor))
    yield library
    library.may_init.set()
    library.may_finish.set()


def formed(timeout_s: float = 60) -> NcclCollective:
    with closing(RendezvousStore(HOST)) as store:
        rendezvous = Rendezvous(
            transport="nccl", host=HOST, port=store.port, world_size=2, timeout_s=timeout_s, secret=UNIQUE_ID
        )  # fmt: skip
        return NcclCollective(RankContext("s1", 1, rendezvous, CPU, store, SessionStore("s1", store, timeout_s)))


@contextlib.contextmanager
def joining() -> Iterator[tuple[Waiting, Waiting]]:
    """Both sides of a session that join it, and leave it when they have."""
    with rendezvous_host() as hosted:
        rendezvous = hosted.rendezvous(num_workers=1, transport="nccl")
        yield (
            Waiting(lambda: hosted.host_collective("s1", rendezvous, CPU).close()),
            Waiting(lambda: join_collective("s1", rendezvous, 1, CPU).close()),
        )


def num_calls(nccl: ScriptedNccl, name: str) -> int:
    return [call[0] for call in nccl.calls].count(name)


def test_both_sides_choose_the_interface_and_join(nccl: ScriptedNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_transport, "use_interface_of", lambda host: nccl.calls.append(("interface", host)))
    monkeypatch.setattr(nccl_transport, "new_unique_id", lambda: nccl.calls.append(("id",)) or UNIQUE_ID)
    with joining() as sides:
        assert all(side.ends_promptly() and not side.error for side in sides)
    assert nccl.calls[:2] == [("interface", HOST), ("id",)]
    calls = [call for call in nccl.calls[2:] if call[0] in ("interface", "init")]
    assert calls[0] == ("interface", HOST) and calls.count(("interface", HOST)) == 2
    assert sorted(calls)[:2] == [("init", 2, UNIQUE_ID, 0), ("init", 2, UNIQUE_ID, 1)]


def test_a_broadcast_waits_for_the_current_stream_and_runs_on_the_side_stream(nccl: ScriptedNccl) -> None:
    collective = formed()
    in_joining = [call[0] for call in nccl.calls]
    assert in_joining == ["init", "side stream waits for", "side stream keeps", "broadcast"] and nccl.calls[-1][3] == 1
    tensor = zeros(48)
    nccl.calls.clear()
    collective.broadcast(tensor)
    address = tensor.data_ptr()
    assert nccl.calls == [
        ("side stream waits for", "stream of MainThread"),
        ("side stream keeps", address),
        ("broadcast", address, address, 48, nccl.NCCL_UINT8, 0, 77),
    ]


def waited_for(nccl: ScriptedNccl) -> list[str]:
    """The stream that each broadcast comes after."""
    orders = [call for call in nccl.calls if call[0] in ("side stream waits for", "broadcast")]
    assert [call[0] for call in orders] == ["side stream waits for", "broadcast"] * (len(orders) // 2)
    return [call[1] for call in orders[::2]]


def test_what_the_thread_that_loads_or_gathers_has_queued_comes_before_each_broadcast(nccl: ScriptedNccl) -> None:
    """A bucket's memory is used again while the copies out of it wait on vLLM's stream, which is that thread's
    alone."""
    manifest = make_manifest(TENSORS, torch.float32, 1024)
    collective = formed()
    nccl.calls.clear()
    pushing = Waiting(lambda: send_weights(collective, split_into_buckets(manifest), TENSORS), name="push")
    assert pushing.ends_promptly() and not pushing.error
    assert waited_for(nccl) == ["stream of push"] * 6
    nccl.calls.clear()
    loading = Waiting(lambda: list(receive_weights(collective, manifest)), name="vLLM")
    assert loading.ends_promptly() and "checksum" in loading.error  # nothing travels here
    assert waited_for(nccl) == ["stream of vLLM"] * 4  # the spans and trailers of two buckets


def test_no_more_are_queued_than_a_stream_takes(nccl: ScriptedNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_transport, "MAX_QUEUED", 3)
    collective = formed()
    nccl.may_finish.clear()
    waits = [collective.start_broadcast(zeros(8)) for _ in range(2)]  # and the one of joining, which is done
    assert num_calls(nccl, "broadcast") == 3
    one_more = Waiting(lambda: collective.start_broadcast(zeros(8)))
    assert not one_more.ends_promptly(0.3)
    nccl.may_finish.set()
    assert one_more.ends_promptly() and not one_more.error
    for wait in waits:
        wait()
    nccl.may_finish.clear()
    waits = [Waiting(lambda: collective.start_broadcast(zeros(8))) for _ in range(4)]
    assert not all(wait.ends_promptly(0.3) for wait in waits)
    collective.abort()
    assert all(wait.ends_promptly() for wait in waits) and any("aborted or closed" in wait.error for wait in waits)


def test_a_receiver_queues_the_next_bucket_before_the_first_has_come(nccl: ScriptedNccl) -> None:
    collective = formed()
    nccl.calls.clear()
    nccl.may_finish.clear()
    receiving = Waiting(lambda: list(receive_weights(collective, make_manifest(TENSORS, torch.float32, 1024))))
    assert not receiving.ends_promptly(0.5)
    assert len(waited_for(nccl)) == 4
    collective.abort()
    assert receiving.ends_promptly() and "aborted or closed" in receiving.error


def test_an_init_that_never_returns_ends_at_the_deadline_and_is_aborted_should_it_return(
    nccl: ScriptedNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl.may_init.clear()
    with joining() as sides:
        until(lambda: num_calls(nccl, "init") == 2)
        race_clock(monkeypatch, group)
        for side in sides:
            assert side.ends_promptly()
            assert "of 2 could not form session s1 within 60 s (learner.weight_sync.timeout_s)" in side.error
    assert not nccl.released.is_set()
    nccl.may_init.set()
    assert nccl.released.wait(60)


def test_any_number_of_servers_joins_at_once(nccl: ScriptedNccl) -> None:
    """The learner is rank 0 of one group for each server, all in one process; here the workers are in it too."""
    num_servers = 24
    nccl.may_init.clear()
    with contextlib.ExitStack() as sessions:
        sides = [side for _ in range(num_servers) for side in sessions.enter_context(joining())]
        until(lambda: num_calls(nccl, "init") == 2 * num_servers)
        assert all(side.is_waiting() for side in sides)
        nccl.may_init.set()
        assert all(side.ends_promptly() and not side.error for side in sides)


def test_joins_that_hang_in_c_are_few_and_then_refused(nccl: ScriptedNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "MAX_STUCK_JOINS", 2)
    nccl.may_init.clear()
    with monkeypatch.context() as patch, joining() as sides:
        until(lambda: num_calls(nccl, "init") == 2)
        race_clock(patch, group)
        assert all(side.ends_promptly() and "could not form session s1" in side.error for side in sides)
    with joining() as sides:
        assert sides[0].ends_promptly()
        assert re.search(r"2 abandoned joins still hang .* restart the process, .* \"tcp\"", sides[0].error)
    nccl.may_init.set()
    until(lambda: num_calls(nccl, "abort") == 2)  # both have returned, and are closed
    with joining() as sides:
        assert all(side.ends_promptly() and not side.error for side in sides)


def test_an_init_that_fails_names_rank_device_and_reason(nccl: ScriptedNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(world_size: int, unique_id: bytes, rank: int) -> None:
        raise RuntimeError("Duplicate GPU detected")

    monkeypatch.setattr(nccl, "NcclCommunicator", refuse)
    with pytest.raises(PushError, match="rank 1 of 2 on cpu could not form session s1 over nccl: Duplicate GPU"):
        formed()


def test_a_broadcast_that_never_ends_is_aborted_at_the_deadline(nccl: ScriptedNccl) -> None:
    collective = formed(timeout_s=0.2)
    nccl.may_finish.clear()
    with pytest.raises(PushError, match=r"session s1 did not finish within 0.2 s \(learner.weight_sync.timeout_s\)"):
        collective.broadcast(zeros(48))
    assert nccl.calls[-1] == ("abort",)


def test_an_error_that_nccl_notices_ends_the_broadcast_at_once(nccl: ScriptedNccl) -> None:
    collective = formed()
    nccl.may_finish.clear()
    nccl.async_error = "remote process exited"
    with pytest.raises(PushError, match="48 bytes over nccl in session s1 failed: remote process exited"):
        collective.broadcast(zeros(48))
    assert nccl.calls[-1] == ("abort",)


@pytest.mark.parametrize("leave", ["abort", "close"])
def test_abort_from_another_thread_wakes_a_broadcast(nccl: ScriptedNccl, leave: str) -> None:
    collective = formed()
    done = collective.start_broadcast(zeros(48))
    nccl.may_finish.clear()
    waiting = Waiting(lambda: collective.broadcast(zeros(48)))
    until(lambda: num_calls(nccl, "broadcast") == 3)
    getattr(collective, leave)()
    assert waiting.ends_promptly() and "session s1 was aborted or closed" in waiting.error
    nccl.may_finish.set()  # an abort ends what is queued, too
    with pytest.raises(PushError, match="session s1 was aborted or closed"):
        done()
    collective.close()
    assert nccl.calls.count(("abort",)) == 1
    with pytest.raises(PushError, match="aborted or closed"):
        collective.broadcast(zeros(1))


def test_ranks_share_a_gpu_from_nccl_2_30_3_on(nccl: ScriptedNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_GPU_SWITCH, "1")
    may = {}
    for nccl.version in (22907, 23002, 23003, 23207):
        may[nccl.version] = ranks_may_share_a_gpu()
    assert may == {22907: False, 23002: False, 23003: True, 23207: True}
    monkeypatch.setenv(SHARED_GPU_SWITCH, "0")
    assert not ranks_may_share_a_gpu()


def test_nccl_is_installed_where_a_libnccl_answers(nccl: ScriptedNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_not_installed() is None and "nccl 2.29.7" in offered_transports()

    def fail(error: Exception) -> None:
        raise error

    for error in (RuntimeError("NCCL_ERROR_SYSTEM_ERROR"), AttributeError("get_version")):
        monkeypatch.setattr(nccl, "get_version", lambda error=error: fail(error))
        assert why_not_installed() is not None and "nccl" not in " ".join(offered_transports())
    nccl.available = False
    assert "finds no libnccl" in (why_not_installed() or "")
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with rendezvous_host() as hosted, pytest.raises(PushError, match=r"needs cupy .*; .*pip install .*\[nccl\]'"):
        hosted.rendezvous(num_workers=1, transport="nccl")


OLD_DRIVER = "the driver supports CUDA 12 at most; run pip uninstall cupy-cuda13x, then .*nccl-cuda12"


@pytest.mark.parametrize(
    ("of_torch", "installed", "of_cupy", "of_driver", "expected"),
    [
        ("13.0", "cupy-cuda13x", 13000, 13000, None),
        ("12.8", "cupy-cuda12x", 12090, 12080, None),
        ("12.8", "cupy-cuda13x", 13000, 12080, f"built for CUDA 13, but {OLD_DRIVER}"),
        ("13.0", "cupy-cuda12x", None, 13000, "is built for CUDA 12, but torch for CUDA 13; .*nccl\\]"),
        ("12.8", "cupy-cuda13x", None, 12080, "is built for CUDA 13, but torch for CUDA 12; .*nccl-cuda12\\]"),
    ],
)
def test_a_cupy_for_another_cuda_is_reported_with_the_extra_for_this_one(
    nccl: ScriptedNccl,
    monkeypatch: pytest.MonkeyPatch,
    of_torch: str,
    installed: str,
    of_cupy: int | None,
    of_driver: int,
    expected: str | None,
) -> None:
    """`of_cupy`: None where its libnccl does not answer."""
    monkeypatch.setattr(torch.version, "cuda", of_torch)
    monkeypatch.setattr(nccl_transport, "_is_distribution", lambda name: name == installed)
    nccl.available = of_cupy is not None
    runtime = sys.modules["cupy.cuda"].runtime
    monkeypatch.setattr(runtime, "runtimeGetVersion", lambda: of_cupy)
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: of_driver)
    found = why_not_installed()
    assert re.search(expected, found) if expected is not None else found is None


@pytest.mark.parametrize(
    ("host", "chosen"),
    [
        ("10.0.0.5", ("=eth1", "AF_INET")),
        ("fd00::5", ("=ib0", "AF_INET6")),
        ("127.0.0.1", (None, None)),
        ("192.0.2.1", (None, None)),
    ],
)
def test_nccl_goes_by_the_interface_of_the_store_if_it_is_known_and_leads_out(
    monkeypatch: pytest.MonkeyPatch, host: str, chosen: tuple[str | None, str | None]
) -> None:
    for name in (INTERFACE, FAMILY):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(nccl_transport, "interface_of", {"10.0.0.5": "eth1", "fd00::5": "ib0"}.get)
    use_interface_of(host)
    assert (os.environ.get(INTERFACE), os.environ.get(FAMILY)) == chosen
    monkeypatch.setenv(INTERFACE, "eth0")  # as the user names it
    use_interface_of(host)
    assert os.environ[INTERFACE] == "eth0"
