"""Ranks that meet, broadcast and part over real sockets: every wait ends, whoever is missing, stuck or gone."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType

import psutil
import pytest
import torch

import protocol.transports.group
import protocol.transports.rendezvous
import protocol.transports.tcp
import protocol.transports.worker_connections
from protocol.errors import PushError
from protocol.transports.collective import Collective
from protocol.transports.group import RendezvousHost, address_towards, join_collective
from protocol.transports.rendezvous import StoreClient, StoreQuery
from protocol.transports.tcp import TcpCollective
from protocol.transports.worker_connections import ConnectionRequest, TcpConnection
from tests.protocol.local_ranks import (
    CPU,
    HOST,
    PROMPTLY_S,
    Waiting,
    broadcast,
    join_all,
    joined,
    race_clock,
    rendezvous_at,
    rendezvous_host,
    zeros,
)
from tests.waiting import until

MORE_THAN_THE_KERNEL_KEEPS = 32 << 20
NUM_SESSIONS = 20

# --- meeting ---------------------------------------------------------------------------------------------------------


def test_the_rendezvous_listens_on_the_named_address_only_and_until_it_is_closed() -> None:
    with rendezvous_host() as hosted:
        port = hosted.rendezvous(1, "tcp").port
        with pytest.raises(OSError), socket.create_connection(("127.0.0.2", port), timeout=1):
            pass
        with socket.create_connection((HOST, port), timeout=1):
            pass
    with pytest.raises(OSError), socket.create_connection((HOST, port), timeout=1):
        pass


def test_missing_workers_are_named_at_the_deadline_and_late_ones_notified(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_clock_of_answers(monkeypatch)
    with rendezvous_host() as hosted:
        rendezvous = hosted.rendezvous(3, "tcp")
        waits = [
            Waiting(lambda: hosted.host_collective("s1", rendezvous, CPU)),
            Waiting(lambda: join_collective("s1", rendezvous, 2, CPU)),
        ]
        until_present(hosted, 0, 2)
        race_clock(monkeypatch, protocol.transports.rendezvous)
        missing = r"session s1 did not form within 60 s \(learner.weight_sync.timeout_s\): missing rank 1, rank 3$"
        assert all(wait.ends_promptly() and re.search(missing, wait.error) for wait in waits)
        with pytest.raises(PushError, match=r"session s1 was canceled: rank . gave up"):
            join_collective("s1", rendezvous, 1, CPU)


def test_a_learner_that_never_comes_ends_the_join_of_the_worker_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep_clock_of_answers(monkeypatch)
    with rendezvous_host() as hosted:
        rendezvous = hosted.rendezvous(1, "tcp")
        worker = Waiting(lambda: join_collective("s1", rendezvous, 1, CPU))
        until_present(hosted, 1)
        race_clock(monkeypatch, protocol.transports.rendezvous)
        assert worker.ends_promptly() and re.search("did not form within 60 s .*: missing rank 0$", worker.error)


def keep_clock_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock of StoreClient go on as before although that of its module is to race.

    Otherwise a query that is on its way at that moment, or takes 3 ms, has no answer within 3 s.
    """
    unraced = dict(vars(protocol.transports.rendezvous))
    monkeypatch.setattr(StoreClient, "_line_after", FunctionType(StoreClient._line_after.__code__, unraced))


def until_present(hosted: RendezvousHost, *ranks: int) -> None:
    """Wait until the ranks have come to session s1."""
    until(lambda: all(hosted._store.query(StoreQuery("s1", f"rank {rank}")) is not None for rank in ranks))


def test_a_silent_dying_or_absent_learner_ends_a_join_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol.transports.group, "ANSWER_TIMEOUT_S", 0.2)
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]

        def join() -> Waiting:
            return Waiting(lambda: join_collective("s1", rendezvous_at(port), 1, CPU))

        silent = join()
        assert silent.ends_promptly()
        listener.accept()[0].close()
        dying = join()
        listener.accept()[0].close()
        assert dying.ends_promptly()
    gone = join()
    assert gone.ends_promptly()
    unreachable = f"cannot reach the learner's rendezvous {HOST}:{port}"
    assert silent.error.startswith(f"{unreachable}: no answer within 0.2 s")
    assert unreachable in dying.error and unreachable in gone.error


def test_a_session_that_is_canceled_ends_the_join_on_both_sides() -> None:
    with rendezvous_host() as hosted:
        rendezvous = hosted.rendezvous(2, "tcp")
        waits = [
            Waiting(lambda: hosted.host_collective("s1", rendezvous, CPU)),
            Waiting(lambda: join_collective("s1", rendezvous, 1, CPU)),
        ]
        time.sleep(0.2)
        assert all(wait.is_waiting() for wait in waits)
        hosted.cancel("s1", "the server refused")
        assert all(wait.ends_promptly() for wait in waits)
        assert {wait.error for wait in waits} == {"session s1 was canceled: the server refused"}


class StuckForming(threading.Event):
    """In place of a group that goes on for its deadline, as when it connects to a process that has died."""

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
    monkeypatch.setattr(TcpCollective, "__init__", forming.form)
    yield forming
    forming.set()


@pytest.mark.parametrize("is_canceled", [True, False], ids=["canceled", "learner gone"])
def test_nobody_waits_for_the_forming_of_a_group_that_is_over(stuck: StuckForming, is_canceled: bool) -> None:
    with rendezvous_host() as hosted:
        rendezvous = hosted.rendezvous(1, "tcp")
        learner = Waiting(lambda: hosted.host_collective("s1", rendezvous, CPU))
        worker = Waiting(lambda: join_collective("s1", rendezvous, 1, CPU))
        stuck.wait_for_ranks(2)
        assert learner.is_waiting() and worker.is_waiting()
        if is_canceled:
            hosted.cancel("s1", "the server went away")
            assert learner.ends_promptly() and worker.ends_promptly()
            assert {learner.error, worker.error} == {"session s1 was canceled: the server went away"}
    assert worker.ends_promptly() and (is_canceled or "cannot reach the learner's rendezvous" in worker.error)


# --- broadcast -------------------------------------------------------------------------------------------------------


def test_every_rank_gets_the_bytes_of_rank_0() -> None:
    with joined(3) as ranks:
        broadcast(ranks, torch.arange(8_000_001).to(torch.uint8))


@pytest.mark.parametrize("own_rank", [0, 1])
def test_abort_wakes_a_broadcast_that_the_other_rank_does_not_join(own_rank: int) -> None:
    with joined() as ranks:
        own = ranks[own_rank]
        waiting = Waiting(lambda: own.broadcast(zeros(MORE_THAN_THE_KERNEL_KEEPS)))
        assert not waiting.ends_promptly(0.5)
        own.abort()
        assert waiting.ends_promptly() and "broadcast of 33554432 bytes in session s1 failed" in waiting.error
        own.abort()
        with pytest.raises(PushError):
            own.broadcast(zeros(16))
        own.close()
        with pytest.raises(PushError, match="the collective of session s1 is closed"):
            own.broadcast(zeros(16))


@pytest.mark.parametrize("leave", ["abort", "close"])
def test_a_rank_that_leaves_ends_its_own_broadcast_and_those_that_wait_for_it(leave: str) -> None:
    with joined(2) as ranks:
        waits = [Waiting(lambda rank=rank: rank.broadcast(zeros(1024))) for rank in ranks[1:]]
        time.sleep(0.2)
        assert all(wait.is_waiting() for wait in waits)
        getattr(ranks[1], leave)()
        assert waits[0].ends_promptly() and "failed" in waits[0].error
        getattr(ranks[0], leave)()
        assert waits[1].ends_promptly() and "failed" in waits[1].error


def test_a_broadcast_that_had_not_begun_when_its_collective_was_closed_fails() -> None:
    with joined() as (learner, _):
        waits = [learner.start_broadcast(zeros(64 << 20)) for _ in range(2)]  # more than the kernel takes
        learner.close()
        queued = Waiting(waits[1])
        assert queued.ends_promptly() and queued.error


def test_a_broadcast_that_a_peer_does_not_join_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with joined() as ranks:
        race_clock(monkeypatch, protocol.transports.worker_connections)
        with pytest.raises(PushError, match=r"deadline 60 s, learner.weight_sync.timeout_s"):
            ranks[1].broadcast(zeros(16))


# --- the chain --------------------------------------------------------------------------------------------------------


def test_the_bytes_leave_the_learner_once_and_each_rank_hands_them_on() -> None:
    with joined(3) as ranks:
        assert ranks[0].parents == {1: 0, 2: 1, 3: 2}
        assert [list(rank.blocked_s()) for rank in ranks] == [[1], [2], [3], []]


def test_a_rank_that_cannot_reach_the_one_before_it_gets_the_bytes_from_the_learner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect_to = protocol.transports.tcp.connect_to

    def behind_a_firewall(host: str, port: int, request: ConnectionRequest, *timeouts: float) -> TcpConnection:
        if request.rank == 2:
            raise TimeoutError("timed out")
        return connect_to(host, port, request, *timeouts)

    monkeypatch.setattr(protocol.transports.tcp, "connect_to", behind_a_firewall)
    with joined(3) as ranks:
        assert ranks[0].parents == {1: 0, 2: 0, 3: 2}
        assert [list(rank.blocked_s()) for rank in ranks] == [[1, 2], [], [3], []]
        broadcast(ranks, torch.arange(3_000_001).to(torch.uint8))
    assert "sending the weights 2 times, because workers cannot reach the one before them" in caplog.text


def test_the_rank_that_takes_no_bytes_is_known_to_the_one_before_it_alone() -> None:
    with joined(3) as ranks:
        waits = [
            Waiting(lambda rank=rank: rank.broadcast(zeros(MORE_THAN_THE_KERNEL_KEEPS)))
            for rank in (*ranks[:2], ranks[3])
        ]
        until(lambda: ranks[1].blocked_s()[2] > 0.5)
        assert ranks[2].blocked_s() == {3: 0.0} and ranks[0].blocked_s() == {1: 0.0}
        ranks[1].abort()
        assert waits[1].ends_promptly() and "failed" in waits[1].error


def test_a_barrier_is_passed_once_all_later_ranks_have_come() -> None:
    with joined(2) as ranks, ThreadPoolExecutor(2) as pool:
        passed = [pool.submit(rank.barrier) for rank in ranks[:2]]  # type: ignore[attr-defined]
        time.sleep(0.2)
        assert not any(one.done() for one in passed)
        ranks[2].barrier()  # type: ignore[attr-defined]
        for one in passed:
            one.result(PROMPTLY_S)


# --- leaks -----------------------------------------------------------------------------------------------------------


def num_held() -> int:
    """Threads and file descriptors of this process."""
    process = psutil.Process()
    return process.num_threads() + process.num_fds()


def fail_to_meet(hosted: RendezvousHost, session: str) -> list[Collective]:
    rendezvous = hosted.rendezvous(2, "tcp")
    waits = [
        Waiting(lambda: hosted.host_collective(session, rendezvous, CPU)),
        Waiting(lambda: join_collective(session, rendezvous, 1, CPU)),
    ]
    hosted.cancel(session, "test")
    assert all(wait.ends_promptly() and wait.error for wait in waits)
    return []


def abort_a_broadcast(hosted: RendezvousHost, session: str) -> list[Collective]:
    learner, worker = join_all(hosted, session)
    waiting = Waiting(lambda: worker.broadcast(zeros(16)))
    time.sleep(0.01)
    worker.abort()
    assert waiting.ends_promptly() and waiting.error
    learner.close()
    worker.close()
    return [learner, worker]


@pytest.mark.parametrize("fail", [fail_to_meet, abort_a_broadcast])
def test_failed_sessions_leave_neither_threads_nor_sockets(
    fail: Callable[[RendezvousHost, str], list[Collective]],
) -> None:
    with rendezvous_host() as hosted:
        fail(hosted, "warm up")
        allowed = num_held() + 2
        # A closed collective may be held on to.
        kept = [fail(hosted, f"e{index}") for index in range(NUM_SESSIONS)]
        deadline = time.monotonic() + PROMPTLY_S
        while num_held() > allowed and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(kept) == NUM_SESSIONS and num_held() <= allowed


def test_a_host_without_an_address_is_named() -> None:
    assert address_towards("tcp://127.0.0.1:5757") == "127.0.0.1"
    with pytest.raises(
        PushError, match=r"no address or route to nowhere\.invalid, the host of tcp://nowhere\.invalid:1"
    ):
        address_towards("tcp://nowhere.invalid:1")
