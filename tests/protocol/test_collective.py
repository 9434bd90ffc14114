"""Ranks that meet, broadcast and part over real sockets: every wait ends, whoever is missing, stopped or gone."""

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch

import protocol.transports.group
from protocol.errors import PushError
from protocol.messages import Rendezvous
from protocol.transports.collective import Collective
from protocol.transports.gloo import GlooCollective
from protocol.transports.group import RendezvousHost, join_collective

HOST = "127.0.0.1"
CPU = torch.device("cpu")
BETWEEN_CPUS = pytest.mark.parametrize("transport", ["gloo", "tcp"])
PROMPTLY_S = 30.0
"""Far below the deadline of a minute that the waits would otherwise have, far above what they take."""


def zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


@contextlib.contextmanager
def rendezvous_host(timeout_s: float) -> Iterator[RendezvousHost]:
    hosted = RendezvousHost(HOST, timeout_s)
    try:
        yield hosted
    finally:
        hosted.close()


def join_all(hosted: RendezvousHost, session: str, num_workers: int = 1, transport: str = "gloo") -> list[Collective]:
    """Form a group whose ranks are all in this process."""
    rendezvous = hosted.rendezvous(num_workers, transport)
    with ThreadPoolExecutor(num_workers) as pool:
        workers = [pool.submit(join_collective, session, rendezvous, 1 + index, CPU) for index in range(num_workers)]
        return [hosted.host_collective(session, rendezvous, CPU), *(worker.result() for worker in workers)]


class Waiting:
    """A call in another thread that is expected to fail."""

    def __init__(self, call: Callable[[], object], name: str | None = None) -> None:
        self._call, self.error = call, ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except PushError as error:
            self.error = str(error)

    def is_waiting(self) -> bool:
        return self._thread.is_alive()

    def ends_promptly(self, timeout_s: float = PROMPTLY_S) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


# --- meeting ---------------------------------------------------------------------------------------------------------


def test_the_rendezvous_listens_on_the_named_address_only_and_until_it_is_closed() -> None:
    with rendezvous_host(timeout_s=1) as hosted:
        port = hosted.rendezvous(num_workers=1, transport="gloo").port
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=1):
            pass
        with socket.create_connection((HOST, port), timeout=1):
            pass
    with pytest.raises(OSError), socket.create_connection((HOST, port), timeout=1):
        pass


@BETWEEN_CPUS
def test_workers_that_never_come_are_named_at_the_deadline(transport: str) -> None:
    with rendezvous_host(timeout_s=0.5) as hosted:
        rendezvous = hosted.rendezvous(num_workers=3, transport=transport)
        waiting = Waiting(lambda: join_collective("s1", rendezvous, 2, CPU))
        with pytest.raises(
            PushError,
            match=r"session s1 did not form within 0.5 s \(learner.weight_sync.timeout_s\): missing rank 1, rank 3$",
        ):
            hosted.host_collective("s1", rendezvous, CPU)
        assert waiting.ends_promptly()


def test_a_worker_that_comes_when_the_learner_has_given_up_is_notified() -> None:
    with rendezvous_host(timeout_s=0.2) as hosted:
        rendezvous = hosted.rendezvous(num_workers=1, transport="gloo")
        with pytest.raises(PushError):
            hosted.host_collective("s1", rendezvous, CPU)
        with pytest.raises(PushError, match="session s1 was canceled: rank 0 gave up"):
            join_collective("s1", rendezvous, 1, CPU)


def test_a_learner_that_never_comes_ends_the_join_of_the_worker_at_the_deadline() -> None:
    with rendezvous_host(timeout_s=0.5) as hosted:
        rendezvous = hosted.rendezvous(num_workers=1, transport="gloo")
        with pytest.raises(PushError, match=r"did not form within 0.5 s .*: missing rank 0$"):
            join_collective("s1", rendezvous, 1, CPU)


def test_a_learner_that_is_not_there_is_an_error_for_the_worker() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    rendezvous = Rendezvous(transport="gloo", host=HOST, port=port, world_size=2, timeout_s=0.5)
    with pytest.raises(PushError, match=f"cannot reach the learner's rendezvous {HOST}:{port}"):
        join_collective("s1", rendezvous, 1, CPU)


def test_a_learner_that_is_silent_ends_the_join_of_the_worker_long_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol.transports.group, "ANSWER_TIMEOUT_S", 0.2)
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        rendezvous = Rendezvous(transport="gloo", host=HOST, port=port, world_size=2, timeout_s=60)
        wait = Waiting(lambda: join_collective("s1", rendezvous, 1, CPU))
        assert wait.ends_promptly()
        assert f"cannot reach the learner's rendezvous {HOST}:{port}: no answer within 0.2 s" in wait.error


@BETWEEN_CPUS
def test_a_session_that_is_canceled_ends_the_join_on_both_sides(transport: str) -> None:
    with rendezvous_host(timeout_s=60) as hosted:
        rendezvous = hosted.rendezvous(num_workers=2, transport=transport)
        waits = [
            Waiting(lambda: hosted.host_collective("s1", rendezvous, CPU)),
            Waiting(lambda: join_collective("s1", rendezvous, 1, CPU)),
        ]
        time.sleep(0.2)
        assert all(wait.is_waiting() for wait in waits)
        hosted.cancel("s1", "the server refused")
        assert all(wait.ends_promptly() for wait in waits)
        assert all("session s1 was canceled: the server refused" in wait.error for wait in waits)


def test_a_learner_that_dies_while_a_worker_joins_ends_the_join_long_before_the_deadline() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        rendezvous = Rendezvous(transport="gloo", host=HOST, port=port, world_size=2, timeout_s=60)
        wait = Waiting(lambda: join_collective("s1", rendezvous, 1, CPU))
        connection, _ = listener.accept()
    connection.recv(1)
    connection.close()
    assert wait.ends_promptly()
    assert f"cannot reach the learner's rendezvous {HOST}:{port}" in wait.error


class StuckForming(threading.Event):
    """In place of gloo's group, which goes on for its deadline when it connects to a process that has died."""

    def __init__(self) -> None:
        super().__init__()
        self._num_forming = threading.Semaphore(0)

    def form(self, *_: object) -> None:
        self._num_forming.release()
        self.wait(60)
        raise PushError("the other ranks are gone")

    def wait_for_ranks(self, num_ranks: int) -> None:
        for _ in range(num_ranks):
            assert self._num_forming.acquire(timeout=PROMPTLY_S)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[StuckForming]:
    forming = StuckForming()
    monkeypatch.setattr(GlooCollective, "__init__", forming.form)
    yield forming
    forming.set()


def test_nobody_waits_for_the_forming_of_a_group_that_was_canceled(stuck: StuckForming) -> None:
    with rendezvous_host(timeout_s=60) as hosted:
        rendezvous = hosted.rendezvous(num_workers=1, transport="gloo")
        waits = [
            Waiting(lambda: hosted.host_collective("s1", rendezvous, CPU)),
            Waiting(lambda: join_collective("s1", rendezvous, 1, CPU)),
        ]
        stuck.wait_for_ranks(2)
        assert all(wait.is_waiting() for wait in waits)
        hosted.cancel("s1", "the server went away")
        assert all(wait.ends_promptly() for wait in waits)
        assert {wait.error for wait in waits} == {"session s1 was canceled: the server went away"}


def test_a_worker_does_not_wait_for_the_forming_of_a_group_whose_learner_has_gone(stuck: StuckForming) -> None:
    with rendezvous_host(timeout_s=60) as hosted:
        rendezvous = hosted.rendezvous(num_workers=1, transport="gloo")
        Waiting(lambda: hosted.host_collective("s1", rendezvous, CPU))
        wait = Waiting(lambda: join_collective("s1", rendezvous, 1, CPU))
        stuck.wait_for_ranks(2)
    assert wait.ends_promptly() and "cannot reach the learner's rendezvous" in wait.error


# --- broadcast -------------------------------------------------------------------------------------------------------


@BETWEEN_CPUS
def test_every_rank_gets_the_bytes_of_rank_0(transport: str) -> None:
    with rendezvous_host(timeout_s=10) as hosted:
        ranks = join_all(hosted, "s1", num_workers=3, transport=transport)
        sent = torch.arange(100_000).to(torch.uint8)
        received = [zeros(sent.numel()) for _ in ranks[1:]]
        with ThreadPoolExecutor(3) as pool:
            workers = [pool.submit(rank.broadcast, buffer) for rank, buffer in zip(ranks[1:], received, strict=True)]
            ranks[0].broadcast(sent)
            for worker in workers:
                worker.result()
        for rank in ranks:
            rank.close()
    assert all(torch.equal(buffer, sent) for buffer in received)


def _join_and_stop(rank: int, port_pipe) -> None:
    """Be one rank of two, take part in one broadcast, then stop without closing anything, as a stopped machine would."""
    if rank == 0:
        hosted = RendezvousHost(HOST, timeout_s=60)
        rendezvous = hosted.rendezvous(num_workers=1, transport="gloo")
        port_pipe.send(rendezvous)
        collective = hosted.host_collective("s1", rendezvous, CPU)
    else:
        collective = join_collective("s1", port_pipe.recv(), rank, CPU)
    collective.broadcast(zeros(16))
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("own_rank", [0, 1])
def test_abort_wakes_a_broadcast_that_waits_for_a_stopped_process(own_rank: int) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_join_and_stop, args=(1 - own_rank, theirs))
    process.start()
    with rendezvous_host(timeout_s=60) as hosted:
        if own_rank == 0:
            rendezvous = hosted.rendezvous(num_workers=1, transport="gloo")
            ours.send(rendezvous)
            collective = hosted.host_collective("s1", rendezvous, CPU)
        else:
            collective = join_collective("s1", ours.recv(), 1, CPU)
        collective.broadcast(zeros(16))
        waiting = Waiting(lambda: collective.broadcast(zeros(32 << 20)))
        time.sleep(0.5)
        assert waiting.is_waiting()
        collective.abort()
        assert waiting.ends_promptly() and "broadcast of 33554432 bytes in session s1 failed" in waiting.error
        collective.abort()
        with pytest.raises(PushError):
            collective.broadcast(zeros(16))
        collective.close()
        collective.close()
        with pytest.raises(PushError, match="the collective of session s1 is closed"):
            collective.broadcast(zeros(16))
    process.kill()
    process.join()


@BETWEEN_CPUS
@pytest.mark.parametrize("leave", ["abort", "close"])
def test_a_rank_that_leaves_ends_its_own_broadcast_and_those_that_wait_for_it(leave: str, transport: str) -> None:
    with rendezvous_host(timeout_s=60) as hosted:
        ranks = join_all(hosted, "s1", num_workers=3, transport=transport)
        waits = [Waiting(lambda rank=rank: rank.broadcast(zeros(1024))) for rank in ranks[1:3]]
        time.sleep(0.2)
        assert all(wait.is_waiting() for wait in waits)
        getattr(ranks[1], leave)()
        assert waits[0].ends_promptly() and "failed" in waits[0].error
        getattr(ranks[0], leave)()
        assert waits[1].ends_promptly() and "failed" in waits[1].error
        for rank in ranks:
            rank.close()


@BETWEEN_CPUS
def test_a_broadcast_that_a_peer_does_not_join_ends_at_the_deadline(transport: str) -> None:
    with rendezvous_host(timeout_s=0.5) as hosted:
        learner, worker = join_all(hosted, "s1", transport=transport)
        with pytest.raises(PushError, match=r"deadline 0.5 s, learner.weight_sync.timeout_s"):
            worker.broadcast(zeros(16))
        learner.close()
        worker.close()


class ForgottenSend:
    """Torch's handle of a send that gloo began on a connection that had just broken: it is not told."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")


class ForgetfulGroup:
    """Torch's group with such a send: to free it takes as long as the send may take."""

    def __init__(self, freed: threading.Event) -> None:
        self._freed = freed

    def broadcast(self, *_: object) -> ForgottenSend:
        return ForgottenSend()

    def recv(self, *_: object) -> None:
        raise RuntimeError("Connection reset by peer")

    def __del__(self) -> None:
        self._freed.wait(60)


def test_neither_an_abort_nor_a_close_waits_for_a_send_that_gloo_has_forgotten() -> None:
    freed = threading.Event()
    with rendezvous_host(timeout_s=60) as hosted:
        learner, worker = join_all(hosted, "s1")
        learner._group = ForgetfulGroup(freed)  # type: ignore[attr-defined]
        waiting = Waiting(lambda: learner.broadcast(zeros(16)))
        time.sleep(0.5)
        assert waiting.is_waiting()
        learner.abort()
        assert waiting.ends_promptly() and "broadcast of 16 bytes in session s1 failed: it was aborted" in waiting.error
        assert Waiting(learner.close).ends_promptly()
        worker.close()
    freed.set()


# --- leaks -----------------------------------------------------------------------------------------------------------


def num_held() -> int:
    """Threads and file descriptors of this process."""
    process = psutil.Process()
    return process.num_threads() + process.num_fds()


def fail_to_meet(hosted: RendezvousHost, session: str) -> list[Collective]:
    rendezvous = hosted.rendezvous(num_workers=2, transport="gloo")
    waits = [
        Waiting(lambda: hosted.host_collective(session, rendezvous, CPU)),
        Waiting(lambda: join_collective(session, rendezvous, 1, CPU)),
    ]
    hosted.cancel(session, "test")
    assert all(wait.ends_promptly() and wait.error for wait in waits)
    return []


def abort_a_broadcast(hosted: RendezvousHost, session: str, transport: str = "gloo") -> list[Collective]:
    learner, worker = join_all(hosted, session, transport=transport)
    waiting = Waiting(lambda: worker.broadcast(zeros(16)))
    time.sleep(0.01)
    worker.abort()
    assert waiting.ends_promptly() and waiting.error
    learner.close()
    worker.close()
    return [learner, worker]


def abort_a_broadcast_over_tcp(hosted: RendezvousHost, session: str) -> list[Collective]:
    return abort_a_broadcast(hosted, session, "tcp")


@pytest.mark.parametrize("fail", [fail_to_meet, abort_a_broadcast, abort_a_broadcast_over_tcp])
def test_failed_sessions_leave_neither_threads_nor_sockets(
    fail: Callable[[RendezvousHost, str], list[Collective]],
) -> None:
    with rendezvous_host(timeout_s=60) as hosted:
        fail(hosted, "warm up")
        allowed = num_held() + 2
        kept = [fail(hosted, f"e{index}") for index in range(50)]  # a closed collective may be held on to
        deadline = time.monotonic() + PROMPTLY_S
        while num_held() > allowed and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(kept) == 50 and num_held() <= allowed
