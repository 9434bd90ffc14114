"""The store through which ranks meet: a query gets an answer or an error soon, and strangers get neither entries nor
memory."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from protocol.errors import PushError
from protocol.transports import rendezvous
from protocol.transports.rendezvous import RankReport, RendezvousStore, SessionStore, StoreClient, StoreQuery
from protocol.transports.worker_connections import MAX_LINE_BYTES
from tests.protocol.local_ranks import HOST

TIMEOUT_S = 60.0


@contextmanager
def two_ranks() -> Iterator[tuple[RendezvousStore, StoreClient]]:
    """The learner's end of a store and a worker's."""
    with closing(RendezvousStore(HOST)) as hosted, closing(StoreClient(HOST, hosted.port, TIMEOUT_S)) as remote:
        yield hosted, remote


def test_what_one_rank_sets_the_others_read_and_only_in_its_session() -> None:
    with two_ranks() as (hosted, remote):
        address = bytes(range(256))
        SessionStore("s1", remote, TIMEOUT_S).set("0/1", address)
        assert SessionStore("s1", hosted, TIMEOUT_S).get("0/1") == address
        assert SessionStore("s1", remote, TIMEOUT_S).get("0/1") == address
        with pytest.raises(PushError, match=r"session s2 did not form within 0.1 s .*: missing 0/1$"):
            SessionStore("s2", remote, 0.1).get("0/1")


def test_a_rank_that_waits_goes_on_when_the_last_key_is_set() -> None:
    with two_ranks() as (hosted, remote):
        store = SessionStore("s1", hosted, TIMEOUT_S)
        waiting = threading.Thread(target=SessionStore("s1", remote, TIMEOUT_S).wait, args=(["a", "b"],))
        waiting.start()
        store.set("b", b"")
        waiting.join(0.3)
        assert waiting.is_alive()
        store.set("a", b"")
        waiting.join(TIMEOUT_S)
        assert not waiting.is_alive()


def test_the_first_reason_for_calling_off_is_the_one_that_all_get() -> None:
    with two_ranks() as (hosted, remote):
        stores = [SessionStore("s1", each, TIMEOUT_S) for each in (hosted, remote)]
        for number, store in enumerate(stores):
            store.cancel(f"reason {number}")
        for store in stores:
            with pytest.raises(PushError, match="session s1 was canceled: reason 0"):
                store.wait([])


def test_a_port_that_may_not_be_opened_is_reported_with_its_key() -> None:
    # Stands for a port below 1024, which only root may open.
    expected = r"cannot listen on 203.0.113.1:80 \(Cannot assign .*\); .* change learner.weight_sync.ports"
    with pytest.raises(PushError, match=expected):
        RendezvousStore("203.0.113.1", (80,))


def test_a_store_that_is_closed_is_an_error_for_all() -> None:
    with two_ranks() as (hosted, remote):
        hosted.close()
        for each in (hosted, remote):
            with pytest.raises(PushError, match="rendezvous"):
                each.query(StoreQuery("s1", "key"))


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\n",
        b"{}\n",
        b'{"type": "query", "session": "\xff", "key": "a"}\n',
        b"x" * (MAX_LINE_BYTES + 1),
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_what_is_no_query_costs_its_sender_the_connection(line: bytes) -> None:
    with two_ranks() as (hosted, remote):
        with socket.create_connection((HOST, hosted.port), TIMEOUT_S) as stranger:
            stranger.sendall(line)
            with pytest.raises(ConnectionResetError) if len(line) > MAX_LINE_BYTES else closing(stranger):
                assert stranger.recv(1) == b""
        assert remote.query(StoreQuery("s1", "key", b"value")) == b"value"


@pytest.mark.parametrize("answer", [b"{}\n", b"[" * 1000 + b"\n", b"HTTP/1.1 400\r\n", b"1" * MAX_LINE_BYTES])
def test_an_answer_of_no_store_is_an_error_and_takes_no_more_memory_than_a_line(answer: bytes) -> None:
    with (
        socket.create_server((HOST, 0)) as listener,
        closing(StoreClient(HOST, listener.getsockname()[1], 2.0)) as remote,
    ):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(answer)
            with pytest.raises(PushError, match=r"answered b.* expected a line of at most 65536 bytes.* Check that"):
                remote.query(StoreQuery("s1", "key"))
            with pytest.raises(PushError, match="cannot reach the learner's rendezvous"):
                remote.query(StoreQuery("s1", "key"))


def test_an_answer_that_trickles_in_is_an_error_at_the_deadline() -> None:
    with (
        socket.create_server((HOST, 0)) as listener,
        closing(StoreClient(HOST, listener.getsockname()[1], 0.5)) as remote,
    ):
        connection, _ = listener.accept()

        def trickle() -> None:
            with connection, contextlib.suppress(OSError):
                for _ in range(50):
                    connection.sendall(b" ")
                    time.sleep(0.1)

        trickling = threading.Thread(target=trickle)
        trickling.start()
        for _ in range(2):
            with pytest.raises(PushError, match=r"cannot reach the learner's rendezvous .* no answer within 0\.5 s"):
                remote.query(StoreQuery("s1", "key"))
        trickling.join(TIMEOUT_S)


def test_more_notes_than_there_is_room_for_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MAX_KEYS", 3)
    with two_ranks() as (hosted, remote):
        for number in range(5):
            remote.query(StoreQuery("s1", f"{number}", b"value"))
        assert [hosted.query(StoreQuery("s1", f"{number}")) for number in range(5)] == [None, None] + 3 * [b"value"]


def test_the_learner_knows_the_last_report_of_each_rank_which_is_answered_with_the_reason_for_calling_off() -> None:
    with two_ranks() as (hosted, remote):
        first, last = (RankReport("s1", 1, "receiving", loading_s=loading_s) for loading_s in (1.0, 2.0))
        assert remote.query(first) is None and remote.query(last) is None
        SessionStore("s1", hosted, TIMEOUT_S).cancel("it is late")
        assert remote.query(last) == b"it is late"
        report, came_at = hosted.report_of("s1", 1) or (None, 0.0)
        assert report == last and time.monotonic() - came_at < TIMEOUT_S
        assert hosted.report_of("s1", 2) is None and hosted.report_of("s2", 1) is None
