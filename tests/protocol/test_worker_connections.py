"""Connections of the workers for tcp: only the secret admits to a rank, and every wait ends."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from protocol.errors import PushError
from protocol.transports.rendezvous import RendezvousStore
from protocol.transports.worker_connections import (
    MAX_EXPECTED,
    ConnectionRequest,
    TcpConnection,
    WorkerConnections,
    connect_to_learner,
)
from tests.protocol.local_ranks import HOST

TIMEOUT_S = 30.0
NOBODY = b"x" * 32


def do_nothing() -> None:
    """The check of a session that nobody has canceled."""


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    """The learner's, at whose port the workers connect."""
    with contextlib.closing(RendezvousStore(HOST)) as store:
        yield store


def connect(store: RendezvousStore, secret: bytes, rank: int) -> TcpConnection:
    """As a worker does."""
    return connect_to_learner(HOST, store.port, ConnectionRequest(secret, rank), TIMEOUT_S)


@contextlib.contextmanager
def pair(timeout_s: float) -> Iterator[tuple[TcpConnection, TcpConnection]]:
    """Both ends of one connection."""
    with socket.create_server((HOST, 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    ends = TcpConnection(near, timeout_s), TcpConnection(far, timeout_s)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def test_each_worker_that_presents_the_secret_gets_the_connection_of_its_rank(store: RendezvousStore) -> None:
    secret = store.worker_connections.expect((1, 2), TIMEOUT_S)
    workers = [connect(store, secret, rank) for rank in (2, 1)]
    peers = store.worker_connections.collect(secret, (1, 2), do_nothing, TIMEOUT_S)
    for rank, peer in peers.items():
        peer.send(memoryview(bytes([rank]) * 5))
    for rank, worker in zip((2, 1), workers, strict=True):
        came = bytearray(5)
        worker.receive(memoryview(came))
        assert came == bytes([rank]) * 5
    for peer in (*peers.values(), *workers):
        peer.close()


def test_a_stranger_is_hung_up_on_and_takes_up_nobodys_place(store: RendezvousStore) -> None:
    secret = store.worker_connections.expect([1], TIMEOUT_S)

    def refused(presented: bytes, rank: int) -> None:
        unwelcome = rf"rank {rank} could not open a connection .* 127.0.0.1:{store.port}: .*advertise"
        with pytest.raises(PushError, match=unwelcome):
            connect(store, presented, rank)

    for presented, rank in ((NOBODY, 1), (b"", 1), (secret, 0), (secret, 2), (secret, -1)):
        refused(presented, rank)
    worker = connect(store, secret, 1)
    refused(secret, 1)
    peer = store.worker_connections.collect(secret, [1], do_nothing, TIMEOUT_S)[1]
    peer.send(memoryview(b"a"))
    worker.receive(memoryview(bytearray(1)))
    refused(secret, 1)
    peer.close()
    worker.close()


def test_workers_that_do_not_call_are_named_at_the_deadline_with_the_keys_to_look_at(store: RendezvousStore) -> None:
    secret = store.worker_connections.expect((1, 2, 3), TIMEOUT_S)
    worker = connect(store, secret, 2)
    missing = r"rank 1, rank 3 did not connect within 0.3 s \(learner.weight_sync.timeout_s\); .*weight_sync.ports"
    with pytest.raises(PushError, match=missing):
        store.worker_connections.collect(secret, (1, 2, 3), do_nothing, 0.3)
    with pytest.raises(OSError, match="closed the connection"):
        worker.receive(memoryview(bytearray(1)))
    worker.close()


def test_a_session_that_is_canceled_ends_the_wait_for_its_workers() -> None:
    def canceled() -> None:
        raise PushError("canceled")

    connections = WorkerConnections()
    with pytest.raises(PushError, match="canceled"):
        connections.collect(connections.expect([1], TIMEOUT_S), [1], canceled, TIMEOUT_S)


def test_of_sessions_whose_workers_never_call_only_the_last_are_remembered() -> None:
    connections = WorkerConnections()
    secrets = [connections.expect([1], TIMEOUT_S) for _ in range(MAX_EXPECTED + 1)]
    with pytest.raises(PushError, match="no longer waits"):
        connections.collect(secrets[0], [1], do_nothing, TIMEOUT_S)
    with pytest.raises(PushError, match="rank 1"):
        connections.collect(secrets[1], [1], do_nothing, 0.0)


def test_neither_silence_nor_a_full_line_is_waited_for_longer_than_the_deadline() -> None:
    with pair(0.3) as (near, far):
        with pytest.raises(TimeoutError, match="8 of 8 bytes were not transferred in time"):
            far.receive(memoryview(bytearray(8)))
        with pytest.raises(TimeoutError, match=r"of 67108864 bytes were not transferred in time"):
            near.send(memoryview(bytes(64 << 20)))


def test_bytes_that_trickle_in_do_not_put_off_the_deadline() -> None:
    ended = threading.Event()
    with pair(0.5) as (near, far), ThreadPoolExecutor(1) as pool:

        def trickle() -> None:
            with contextlib.suppress(OSError):
                for _ in range(100):  # 5 s, ten times the deadline, after which the line ends
                    if ended.wait(0.05):
                        return
                    near.send(memoryview(b"a"))
                near.shut()

        trickling = pool.submit(trickle)
        with pytest.raises(TimeoutError, match="of 1000000 bytes"):
            far.receive(memoryview(bytearray(1_000_000)))
        ended.set()
        trickling.result()
