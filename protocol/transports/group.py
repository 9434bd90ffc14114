"""Collective of a weight sync: the learner is rank 0, workers are ranks 1..N.

    Rendezvous ─▶ connect to the learner's store ─▶ all ranks meet ─▶ form the group ─▶ broadcast* ─▶ close

A collective lives for one session. After any error, it is closed, and a new session forms a new one. Forming
cannot be interrupted, so it starts only when every rank is present. A rank that gives up cancels the session
for all ranks, and leaves the forming to a background thread.

During a transfer, `watched` keeps a connection to the learner's store, and reports what the rank does. While
it only receives, TCP does not notice that a host has vanished. NCCL notices nothing within a host. The
transfer is aborted once the session is canceled or the learner's kernel does not answer. A learner that only
pauses, to write a checkpoint, keeps its transfer. Only this folder and weights/ import torch at the top level.
"""

import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import closing, contextmanager, suppress

import msgspec
import torch

from protocol.endpoint import is_loopback, join_address, needs_ipv6, split_endpoint
from protocol.errors import PushError, PushInterrupted
from protocol.line_socket import keep_alive
from protocol.messages import Rendezvous
from protocol.transports.collective import Collective, RankContext, load_transport
from protocol.transports.rendezvous import (
    RankReport,
    RendezvousStore,
    SessionStore,
    StoreClient,
    StoreOrClient,
    canceled_error,
)
from protocol.transports.worker_connections import MAX_LINE_BYTES

ANSWER_TIMEOUT_S = 3.0
"""Maximum time for an answer of the learner's store, which answers at once from its own thread."""
CHECK_INTERVAL_S = 0.05
"""Interval between two checks that the session is not canceled, in seconds."""
JOIN_SLACK_S = 1.0
"""Additional time of a join over its parts, so that the part that knows what is missing fails first."""
MAX_STUCK_JOINS = 64
"""Maximum number of abandoned joins. A join that hangs in C cannot be canceled, and keeps a thread until its
process exits. One outage may leave one join per server of a fleet."""
_abandoned: set[threading.Thread] = set()
"""Threads of abandoned joins. Most exit soon, but those that hang in C never do."""
WATCH_INTERVAL_S = 0.25
"""Interval between two reports of a rank that receives, in seconds."""
DEAD_AFTER_S = 6
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: DEAD_AFTER_S - 1,
    socket.TCP_USER_TIMEOUT: DEAD_AFTER_S * 1000,  # else an unanswered query is resent for minutes, unprobed
}
"""Keepalive options. A link that loses one packet in a hundred loses this many in a row once in years of
transfers."""


def address_towards(endpoint: str) -> str:
    """Return the local address from which `tcp://host:port` is reached.

    The server's workers can connect back to it.

    Raises:
        PushError: The host has no address, or this machine has no route to it.
    """
    host, port = split_endpoint(endpoint)
    family = socket.AF_INET6 if needs_ipv6(host) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PushError(
            f"this machine has no address or route to {host}, the host of {endpoint} ({error}); check the name, DNS "
            "and the routes (`ip route get`), or use another address of the server as its endpoint"
        ) from error


class RendezvousHost:
    """Meeting point of all ranks of a session, on the learner.

    Until `close`, it listens on the address by which the server reaches the learner, on the first free port
    of `ports` (0: any). The ranks connect to `advertise` instead, if the server sees another address. Loopback
    has only one.
    """

    def __init__(
        self, host: str, timeout_s: float, *, ports: Sequence[int] = (0,), advertise: str | None = None
    ) -> None:
        self.advertised = host if advertise is None or is_loopback(host) else advertise
        """Address to which the ranks connect."""
        self._timeout_s = timeout_s
        self._store = RendezvousStore(host, ports)

    def rendezvous(self, num_workers: int, transport: str) -> Rendezvous:
        """Return where and how the ranks of a new session connect, as its only server sees it.

        Raises:
            PushError: The transport is unknown or not installed.
        """
        secret = load_transport(transport).new_secret(self._store, 1 + num_workers, self._timeout_s)
        return Rendezvous(
            transport=transport, host=self.advertised, port=self._store.port, world_size=1 + num_workers,
            timeout_s=self._timeout_s, secret=secret,
        )  # fmt: skip

    def report_of(self, session: str, rank: int) -> tuple[RankReport, float] | None:
        """Return the last report of a rank and its arrival time, or None if there is no report."""
        return self._store.report_of(session, rank)

    def host_collective(self, session: str, rendezvous: Rendezvous, device: torch.device) -> Collective:
        """Join as rank 0, and block until every worker has joined.

        Raises:
            PushError: At the deadline, or after `cancel`.
        """
        return _join(session, rendezvous, 0, device, self._store)

    def cancel(self, session: str, reason: str) -> None:
        """Cancel a session, from any thread.

        Every rank that is joining, here and at the server, raises PushError at once.
        """
        SessionStore(session, self._store, self._timeout_s).cancel(reason)

    def close(self) -> None:
        """Stop listening. A worker that is joining gets an error."""
        self._store.close()


def join_collective(session: str, rendezvous: Rendezvous, rank: int, device: torch.device) -> Collective:
    """Join the learner's session from a worker of the server.

    Raises:
        PushError: At the deadline, if a rank has given up, or soon after the learner is gone or suspended.
    """
    answer_timeout_s = min(ANSWER_TIMEOUT_S, rendezvous.timeout_s)
    with closing(StoreClient(rendezvous.host, rendezvous.port, answer_timeout_s)) as client:
        return _join(session, rendezvous, rank, device, client)


def _join(
    session: str, rendezvous: Rendezvous, rank: int, device: torch.device, rendezvous_store: StoreOrClient
) -> Collective:
    store = SessionStore(session, rendezvous_store, rendezvous.timeout_s)
    deadline = time.monotonic() + rendezvous.timeout_s + JOIN_SLACK_S

    def check() -> None:
        store.report(rank)
        if time.monotonic() > deadline:
            raise PushInterrupted(
                f"rank {rank} of {rendezvous.world_size} could not form session {session} within "
                f"{rendezvous.timeout_s:g} s (learner.weight_sync.timeout_s): the process of another rank is suspended "
                "or unreachable"
            )

    def meet_and_form() -> Collective:
        store.set(f"rank {rank}", b"")
        store.wait([f"rank {other}" for other in range(rendezvous.world_size)])
        return transport(RankContext(session, rank, rendezvous, device, rendezvous_store, store))

    try:
        transport = load_transport(rendezvous.transport)
        if len(rendezvous.secret or b"") != transport.secret_bytes:
            raise PushError(
                f"transport {rendezvous.transport} expects a secret of {transport.secret_bytes} bytes, got "
                f"{len(rendezvous.secret or b'')}; install the same slipstream-rl on both sides"
            )
        if transport.may_hang:
            _check_few_are_stuck()
        return _form_while(check, meet_and_form)
    except PushError as error:
        with suppress(PushError):
            store.cancel(f"rank {rank} gave up: {error}")
        raise


def _form_while(check: Callable[[], None], form: Callable[[], Collective]) -> Collective:
    """Form a collective in its own thread, because it may block for long in C.

    Raises:
        PushError: If `form` fails, or at once if `check` raises it.
    """
    formed: Future[Collective] = Future()

    def run() -> None:
        try:
            collective = form()
        except Exception as error:  # every error belongs to the caller, in the other thread
            traceback.clear_frames(error.__traceback__)  # otherwise they keep the failed join's sockets open
            with suppress(InvalidStateError):
                formed.set_exception(error)
            return
        try:
            formed.set_result(collective)
        except InvalidStateError:
            collective.close()

    thread = threading.Thread(target=run, name="join", daemon=True)
    thread.start()
    try:
        while not wait([formed], CHECK_INTERVAL_S).done:
            check()
    except PushError:
        if formed.cancel():
            _abandoned.add(thread)
            raise
    return formed.result()


def _check_few_are_stuck() -> None:
    _abandoned.difference_update([thread for thread in tuple(_abandoned) if not thread.is_alive()])
    if len(_abandoned) >= MAX_STUCK_JOINS:
        raise PushError(
            f"{len(_abandoned)} abandoned joins still hang in this process and cannot be canceled; "
            'restart the process, or set learner.weight_sync.transport = "tcp"'
        )


@contextmanager
def watched(
    collective: Collective, rendezvous: Rendezvous, session: str, rank: int, version: int = 0
) -> Iterator["Watch"]:
    """Abort the broadcasts soon after the session is canceled or the learner is gone, and report what the rank does.

    Raises:
        PushError: A broadcast fails, with the reason if there is one.
    """
    watch = Watch(collective, (rendezvous.host, rendezvous.port), session, rank, version)
    watch.start()
    try:
        yield watch
        watch.has_received = True
    except PushError as effect:
        if watch.reason is not None:
            raise PushInterrupted(f"{watch.reason}; the transfer failed: {effect}") from effect
        raise
    finally:
        watch.stop()


class Watch(threading.Thread):
    """Thread that reports to the learner's store until `stop`, and once more if all was received."""

    def __init__(self, collective: Collective, address: tuple[str, int], session: str, rank: int, version: int) -> None:
        super().__init__(name="push-watch", daemon=True)
        self._collective, self._address, self._session, self._rank = collective, address, session, rank
        self._version = version
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        """Lock around `stop` and the abort. After `stop`, the collective belongs to another transfer."""
        self.reason: str | None = None
        """Reason why the collective was aborted."""
        self.loading_since: float | None = None
        """Time since which the caller loads one bucket. None while it waits for the next one."""
        self.has_received = False
        self._has_told = False
        """Whether the learner knows that all was received."""

    def run(self) -> None:
        try:
            self._is_over.wait(WATCH_INTERVAL_S)
            while not self._is_over.is_set():
                # The store closed the connection during a query. The next attempt shows whether the store is
                # still there.
                with suppress(ConnectionResetError, BrokenPipeError):
                    self._keep_reporting()
            if self.has_received and not self._has_told:
                with socket.create_connection(self._address, DEAD_AFTER_S) as connection:
                    connection.sendall(self._report())
        except PushError as canceled:
            self._abort(str(canceled))
        except OSError as error:
            where = join_address(*self._address)
            self._abort(f"the learner at {where} is gone or its host is unreachable ({error})")
        except msgspec.MsgspecError as error:
            self._abort(f"the process at {join_address(*self._address)} is not the learner ({error})")

    def stop(self) -> None:
        with self._lock:
            self._is_over.set()

    def _abort(self, reason: str) -> None:
        with self._lock:
            if not self._is_over.is_set():
                self.reason = reason
                self._collective.abort()

    def _report(self) -> bytes:
        loading_since = self.loading_since
        report = RankReport(
            self._session, self._rank, "received" if self.has_received else "receiving",
            loading_s=0.0 if loading_since is None else time.monotonic() - loading_since,
            blocked_s=max(self._collective.blocked_s().values(), default=0.0),
            version=self._version,
        )  # fmt: skip
        return msgspec.json.encode(report) + b"\n"

    def _keep_reporting(self) -> None:
        """Report until the transfer is over or the store disconnects.

        The store disconnects clients that are silent for long.

        Raises:
            PushError: The session is canceled.
        """
        with socket.create_connection(self._address, DEAD_AFTER_S) as connection:
            keep_alive(connection, KEEPALIVE)
            while not self._is_over.is_set():
                connection.sendall(self._report())
                answer = self._answer(connection)
                if answer is None:
                    break
                reason = msgspec.json.decode(answer, type=bytes | None)
                if reason is not None:
                    raise canceled_error(self._session, reason)
                self._is_over.wait(WATCH_INTERVAL_S)
            if self._is_over.is_set() and self.has_received:
                # Over another connection, it might arrive before the last report, and be overwritten by it.
                connection.sendall(self._report())
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(MAX_LINE_BYTES):  # an unread answer would discard the report
                    pass
                self._has_told = True

    def _answer(self, connection: socket.socket) -> bytes | None:
        """Return one line, or None if the transfer or the connection is over first."""
        events = select.poll()
        events.register(connection, select.POLLIN)
        line = b""
        while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
            if self._is_over.is_set():
                return None
            if events.poll(WATCH_INTERVAL_S * 1000):
                part = connection.recv(MAX_LINE_BYTES)
                if not part:
                    return None
                line += part
        return line
