"""Rendezvous store: key-value pairs in the learner's memory, shared by all ranks.

    StoreClient (a rank) ── a line: session, key, value or null ──▶ RendezvousStore (the learner's)
                         ◀── a line: value or null ──────────────
    a rank that joins or receives ── a line: RankReport ─────────▶ reports, by which a late rank is found
    a worker's connection for weights (worker_connections.py) ──▶ the same port

It replaces torch's TCPStore, which resolves the learner's name before it connects. Without a name server,
that takes 5 s. TCPStore also keeps connecting to a dead learner.
Invariant: a rank that sends a query gets its answer or an error within its answer timeout.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
from torch.distributed import Store

from protocol.endpoint import join_address
from protocol.errors import PushError, PushInterrupted
from protocol.transports.port import POLL_S, Port
from protocol.transports.worker_connections import MAX_LINE_BYTES, ConnectionRequest, WorkerConnections

MAX_KEYS = 1_000
"""Maximum number of entries, and of reports, of all sessions. The oldest are dropped first."""
CANCEL_REASON = "cancel reason"
"""Key of the reason why a session was canceled."""


class StoreQuery(msgspec.Struct, frozen=True, tag="query"):
    """Query for the value of a key, which is set first if the query has a value."""

    session: str
    key: str
    value: bytes | None = None


class RankReport(msgspec.Struct, frozen=True, tag="report"):
    """What a rank does in a session, sent several times a second. The answer is why the session was canceled, or null.

    A rank that is stopped, or whose host is gone, sends none.
    """

    session: str
    rank: int
    stage: Literal["joining", "receiving", "received"]
    loading_s: float = 0.0
    """Time since which the rank loads one bucket. 0: it waits for the next one."""
    blocked_s: float = 0.0
    """Time since which the next rank of a chain has taken no byte from this one."""
    version: int = 0
    """Version of the sync in which the rank receives. A report may arrive after the next sync has started."""


def canceled_error(session: str, reason: bytes) -> PushError:
    """Return the error of a rank whose session was canceled."""
    return PushInterrupted(f"session {session} was canceled: {reason.decode()}")


class RendezvousStore:
    """Rendezvous store in the learner's process.

    Until `close`, it listens on one address, on the first free port of `ports` (0: any).
    """

    def __init__(self, host: str, ports: Sequence[int] = (0,)) -> None:
        self.own_host = host
        """Address of this rank toward the other ranks."""
        self.worker_connections = WorkerConnections()
        self._values: dict[tuple[str, str], bytes] = {}
        self._reports: dict[tuple[str, int], tuple[RankReport, float]] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._port = Port(host, ports, self._serve)
        self.port = self._port.number

    def query(self, query: StoreQuery | RankReport) -> bytes | None:
        """Return the value of a key. Raises PushError if the store is closed or cannot be reached."""
        if self._is_closed:
            raise PushInterrupted("the learner's rendezvous is closed")
        with self._lock:
            if isinstance(query, RankReport):
                self._reports[query.session, query.rank] = (query, time.monotonic())
                while len(self._reports) > MAX_KEYS:
                    del self._reports[next(iter(self._reports))]
                return self._values.get((query.session, CANCEL_REASON))
            name = (query.session, query.key)
            if query.value is not None:
                self._values[name] = query.value
            while len(self._values) > MAX_KEYS:
                del self._values[next(iter(self._values))]
            return self._values.get(name)

    def report_of(self, session: str, rank: int) -> tuple[RankReport, float] | None:
        """Return the last report of a rank and its arrival time, or None if there is no report."""
        return self._reports.get((session, rank))

    def close(self) -> None:
        """Stop listening. A rank that still sends a query gets an error."""
        self._is_closed = True
        self._port.close()
        self.worker_connections.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection.makefile("rwb") as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                request = msgspec.json.decode(line, type=StoreQuery | RankReport | ConnectionRequest)
                if isinstance(request, ConnectionRequest):
                    self.worker_connections.admit(connection, request)
                    return
                answer = self.query(request)
                lines.write(msgspec.json.encode(answer) + b"\n")
                lines.flush()


class StoreClient:
    """Client of the rendezvous store in another process.

    Raises:
        PushError: There is no store at the address.
    """

    def __init__(self, host: str, port: int, answer_timeout_s: float) -> None:
        self._address, self._answer_timeout_s = join_address(host, port), answer_timeout_s
        try:
            self._socket = socket.create_connection((host, port), answer_timeout_s)
        except OSError as error:
            raise self._unreachable(error) from error
        self.own_host: str = self._socket.getsockname()[0]
        self._lock = threading.Lock()
        self._is_late = False
        """Whether an answer was not complete at its deadline. The rest of it would be read as the next answer."""

    def query(self, query: StoreQuery | RankReport) -> bytes | None:
        try:
            with self._lock:
                line = self._line_after(msgspec.json.encode(query) + b"\n")
        except OSError as error:
            raise self._unreachable(error) from error
        if not line:
            raise self._unreachable("it closed the connection")
        return self._value_in(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # already broken
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        with self._lock:
            self._socket.close()

    def _line_after(self, query: bytes) -> bytes:
        """Return the answer, or what has arrived of it when the connection ends.

        Raises:
            TimeoutError: The line is not complete at its deadline, or an earlier one was not.
        """
        if self._is_late:
            raise TimeoutError
        deadline = time.monotonic() + self._answer_timeout_s
        self._socket.settimeout(self._answer_timeout_s)
        try:
            self._socket.sendall(query)
            line, part = b"", b"?"
            while part and b"\n" not in part and len(line) < MAX_LINE_BYTES:
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                self._socket.settimeout(left_s)
                part = self._socket.recv(MAX_LINE_BYTES - len(line))
                line += part
        except TimeoutError:
            self._is_late = True
            raise
        return line

    def _value_in(self, line: bytes) -> bytes | None:
        try:
            return msgspec.json.decode(line, type=bytes | None)
        except msgspec.DecodeError as error:
            self.close()  # the rest of the line would be read as the next answer
            raise PushError(
                f"the rendezvous {self._address} answered {line[:80]!r} ({len(line)} bytes); expected a line of at "
                f"most {MAX_LINE_BYTES} bytes with a value in JSON. Check that no other program answers there"
            ) from error

    def _unreachable(self, reason: object) -> PushError:
        if isinstance(reason, TimeoutError):
            reason = (
                f"no answer within {self._answer_timeout_s:g} s; the learner is suspended or its host is unreachable"
            )
        return PushError(f"cannot reach the learner's rendezvous {self._address}: {reason}")


StoreOrClient = RendezvousStore | StoreClient
"""The learner's rendezvous store, in its own process or from another. Both have the same methods."""


class SessionStore(Store):
    """Entries of one session as a torch Store. Every wait may raise PushError."""

    def __init__(self, session: str, store: StoreOrClient, timeout_s: float) -> None:
        super().__init__()
        self._session, self._store, self._timeout_s = session, store, timeout_s

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._query(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._query(key) or b""

    def wait(self, keys: Sequence[str], _: object = None) -> None:
        """Wait until all keys are set.

        Raises:
            PushError: At the deadline of the session, or if the session is canceled.
        """
        deadline = time.monotonic() + self._timeout_s
        missing = list(keys)
        while missing := [key for key in missing if self._query(key) is None]:
            if time.monotonic() > deadline:
                raise PushInterrupted(
                    f"session {self._session} did not form within {self._timeout_s:g} s "
                    f"(learner.weight_sync.timeout_s): missing {', '.join(missing)}"
                )
            self.check_not_canceled()
            time.sleep(POLL_S)
        self.check_not_canceled()

    def cancel(self, reason: str) -> None:
        """Cancel the session: all its joins and transfers fail. The first reason stays."""
        if self._query(CANCEL_REASON) is None:
            self._query(CANCEL_REASON, reason.encode())

    def check_not_canceled(self) -> None:
        if (reason := self._query(CANCEL_REASON)) is not None:
            raise canceled_error(self._session, reason)

    def report(self, rank: int) -> None:
        """Show that a rank is still joining. Raises PushError if the session was canceled."""
        if (reason := self._store.query(RankReport(self._session, rank, "joining"))) is not None:
            raise canceled_error(self._session, reason)

    def _query(self, key: str, value: bytes | None = None) -> bytes | None:
        return self._store.query(StoreQuery(self._session, key, value))
