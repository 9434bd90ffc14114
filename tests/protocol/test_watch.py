"""The watch over a transfer: what ends it, and what it leaves alone. A host that vanishes: tests/test_two_hosts.py."""

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

import protocol.transports.group
import protocol.transports.rendezvous
from protocol.errors import PushError
from protocol.messages import Rendezvous
from protocol.transports.group import RendezvousHost, watched
from tests.protocol.test_collective import Waiting
from tests.watching import WaitingCollective, transfer

INTERVAL_S = 0.05


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol.transports.group, "WATCH_INTERVAL_S", INTERVAL_S)


@pytest.fixture
def rendezvous_host() -> Iterator[RendezvousHost]:
    rendezvous_host = RendezvousHost("127.0.0.1", 30.0)
    yield rendezvous_host
    rendezvous_host.close()


def test_a_transfer_ends_when_the_learner_is_gone(rendezvous_host: RendezvousHost) -> None:
    rendezvous = rendezvous_host.rendezvous(1, "gloo")
    rendezvous_host.close()
    with pytest.raises(PushError, match=r"the learner at .* is gone or .*refused.*; the transfer failed: a broadcast"):
        transfer(rendezvous)


def test_a_transfer_ends_when_the_learner_lives_and_has_canceled_its_session(rendezvous_host: RendezvousHost) -> None:
    rendezvous = rendezvous_host.rendezvous(1, "gloo")
    rendezvous_host.cancel("e1", "it gave up")
    with pytest.raises(PushError, match=r"^session e1 was canceled: it gave up; the transfer failed: a broadcast"):
        transfer(rendezvous)


def test_a_transfer_ends_when_its_session_is_canceled_long_after_it_began(rendezvous_host: RendezvousHost) -> None:
    waiting = Waiting(lambda: transfer(rendezvous_host.rendezvous(1, "gloo")))
    assert not waiting.ends_promptly(10 * INTERVAL_S)
    rendezvous_host.cancel("e1", "it gave up")
    assert waiting.ends_promptly(30.0) and "session e1 was canceled" in waiting.error


def test_a_transfer_goes_on_when_another_session_is_canceled(rendezvous_host: RendezvousHost) -> None:
    collective = WaitingCollective()
    rendezvous_host.cancel("e0", "it gave up")
    with watched(collective, rendezvous_host.rendezvous(1, "gloo"), "e1"):
        assert not collective.aborted.wait(10 * INTERVAL_S)


def test_a_transfer_ends_when_something_else_answers_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
                connection.recv(1)

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        port = listener.getsockname()[1]
        rendezvous = Rendezvous(transport="gloo", host="127.0.0.1", port=port, world_size=2, timeout_s=30.0)
        with pytest.raises(PushError, match=f"the process at 127.0.0.1:{port} is not the learner"):
            transfer(rendezvous)
        answering.join(30.0)


def test_a_transfer_goes_on_while_the_learner_stands_still() -> None:
    with socket.create_server(("127.0.0.1", 0)) as never_accepts:
        port = never_accepts.getsockname()[1]
        rendezvous = Rendezvous(transport="gloo", host="127.0.0.1", port=port, world_size=2, timeout_s=30.0)
        collective = WaitingCollective()
        with watched(collective, rendezvous, "e1"):
            assert not collective.aborted.wait(10 * INTERVAL_S)


def test_a_transfer_goes_on_when_the_store_ends_a_connection_that_says_nothing(
    rendezvous_host: RendezvousHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol.transports.rendezvous, "IDLE_TIMEOUT_S", INTERVAL_S)
    collective = WaitingCollective()
    with watched(collective, rendezvous_host.rendezvous(1, "gloo"), "e1"):
        assert not collective.aborted.wait(20 * INTERVAL_S)


def test_a_transfer_goes_on_when_a_query_meets_a_connection_that_the_store_has_just_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        is_asked_again = threading.Event()

        def answer() -> None:
            ended, _ = listener.accept()
            ended.recv(1)
            ended.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, at once
            ended.close()
            again, _ = listener.accept()
            with again:
                while again.recv(1 << 10):
                    again.sendall(b"null\n")
                    is_asked_again.set()

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        port = listener.getsockname()[1]
        rendezvous = Rendezvous(transport="gloo", host="127.0.0.1", port=port, world_size=2, timeout_s=30.0)
        collective = WaitingCollective()
        with watched(collective, rendezvous, "e1"):
            assert is_asked_again.wait(30.0) and not collective.aborted.wait(5 * INTERVAL_S)
        answering.join(30.0)


def test_what_comes_after_a_transfer_is_not_ended_with_its_learner(rendezvous_host: RendezvousHost) -> None:
    collective = WaitingCollective()
    with watched(collective, rendezvous_host.rendezvous(1, "gloo"), "e1"):
        time.sleep(3 * INTERVAL_S)
    rendezvous_host.close()
    assert not collective.aborted.wait(10 * INTERVAL_S)


def test_another_failure_of_a_transfer_stays_as_it_is(rendezvous_host: RendezvousHost) -> None:
    with (
        pytest.raises(PushError, match=r"^another$"),
        watched(WaitingCollective(), rendezvous_host.rendezvous(1, "gloo"), "e1"),
    ):
        raise PushError("another")
