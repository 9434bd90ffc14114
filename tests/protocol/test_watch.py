"""The watch over a transfer: what ends it, and what it leaves alone. A host that vanishes: tests/test_two_hosts.py."""

import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

import protocol.transports.group
import protocol.transports.port
from protocol.errors import PushError
from protocol.transports.group import RendezvousHost, watched
from tests.protocol.local_ranks import HOST, Waiting, rendezvous_at, rendezvous_host
from tests.watching import WaitingCollective, transfer

INTERVAL_S = 0.05


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol.transports.group, "WATCH_INTERVAL_S", INTERVAL_S)


@pytest.fixture
def hosted() -> Iterator[RendezvousHost]:
    with rendezvous_host() as hosted:
        yield hosted


def test_a_transfer_ends_when_the_learner_is_gone(hosted: RendezvousHost) -> None:
    rendezvous = hosted.rendezvous(1, "tcp")
    hosted.close()
    with pytest.raises(
        PushError, match=r"the learner at .* is gone or .*refused.*; the transfer failed: (a|the) broadcast"
    ):
        transfer(rendezvous)


def test_a_transfer_ends_when_its_own_session_is_canceled(hosted: RendezvousHost) -> None:
    waiting = Waiting(lambda: transfer(hosted.rendezvous(1, "tcp")))
    hosted.cancel("e0", "another gave up")
    assert not waiting.ends_promptly(10 * INTERVAL_S)
    hosted.cancel("e1", "it gave up")
    assert waiting.ends_promptly()
    assert re.match("session e1 was canceled: it gave up; the transfer failed: (a|the) broadcast", waiting.error)


@contextmanager
def answers(*connections: Callable[[socket.socket], None]) -> Iterator[int]:
    """Accept one connection after the other at a port."""
    with socket.create_server((HOST, 0)) as listener:

        def answer() -> None:
            for serve in connections:
                with listener.accept()[0] as connection:
                    serve(connection)

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        yield listener.getsockname()[1]
        answering.join(30.0)


def test_a_transfer_ends_when_something_else_answers_at_the_address() -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        connection.recv(1)

    with answers(answer) as port, pytest.raises(PushError, match=f"the process at {HOST}:{port} is not the learner"):
        transfer(rendezvous_at(port))


def test_a_transfer_goes_on_while_the_learner_stands_still() -> None:
    with socket.create_server((HOST, 0)) as never_accepts:
        collective = WaitingCollective()
        with watched(collective, rendezvous_at(never_accepts.getsockname()[1]), "e1", 1):
            assert not collective.aborted.wait(10 * INTERVAL_S)


def test_a_transfer_goes_on_when_the_store_ends_a_silent_connection(
    hosted: RendezvousHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol.transports.port, "IDLE_TIMEOUT_S", INTERVAL_S)
    collective = WaitingCollective()
    with watched(collective, hosted.rendezvous(1, "tcp"), "e1", 1):
        assert not collective.aborted.wait(20 * INTERVAL_S)


def test_a_transfer_goes_on_when_a_query_meets_a_connection_that_the_store_has_just_ended() -> None:
    is_asked_again = threading.Event()

    def reset(connection: socket.socket) -> None:
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def answer(connection: socket.socket) -> None:
        while connection.recv(1 << 10):
            connection.sendall(b"null\n")
            is_asked_again.set()

    collective = WaitingCollective()
    with answers(reset, answer) as port, watched(collective, rendezvous_at(port), "e1", 1):
        assert is_asked_again.wait(30.0) and not collective.aborted.wait(5 * INTERVAL_S)


def test_the_learner_hears_that_all_was_received_after_all_other_reports() -> None:
    stages: list[str] = []
    is_heard = threading.Event()

    def hear(connection: socket.socket) -> None:
        with connection.makefile("rwb") as lines:
            for line in lines:
                stages.append(msgspec.json.decode(line)["stage"])
                lines.write(b"null\n")
                lines.flush()
                is_heard.set()

    with answers(hear) as port, watched(WaitingCollective(), rendezvous_at(port), "e1", 1):
        assert is_heard.wait(30.0)
    assert stages.pop() == "received" and set(stages) == {"receiving"}


def test_what_comes_after_a_transfer_is_not_ended_with_its_learner(hosted: RendezvousHost) -> None:
    collective = WaitingCollective()
    with watched(collective, hosted.rendezvous(1, "tcp"), "e1", 1):
        time.sleep(3 * INTERVAL_S)
    hosted.close()
    assert not collective.aborted.wait(10 * INTERVAL_S)


def test_another_failure_of_a_transfer_stays_as_it_is(hosted: RendezvousHost) -> None:
    with (
        pytest.raises(PushError, match=r"^another$"),
        watched(WaitingCollective(), hosted.rendezvous(1, "tcp"), "e1", 1),
    ):
        raise PushError("another")
