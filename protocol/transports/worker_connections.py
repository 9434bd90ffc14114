"""Connections for weights, from a rank to the one that sends to it: the learner, or the rank before it.

    rank 1 ── secret, rank ──▶ the learner's port (rendezvous.py) ──▶ WorkerConnections ──▶ rank 0
    rank 2 ── secret, rank ──▶ the port of rank 1 (WorkerPort) ─────▶ WorkerConnections ──▶ rank 1

The secret of the session travels only in the rendezvous. The learner connects to nobody, so address
translation on either side is no obstacle.

Invariants: a failed connection carries nothing more, because its position in the stream is unknown. Only a
worker that has presented the secret gets a rank.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection

import msgspec

from protocol.endpoint import join_address, needs_ipv6
from protocol.errors import PushError
from protocol.transports.port import Port

SECRET_BYTES = 32
MAX_LINE_BYTES = 1 << 16
ADMITTED = b"+"
TICK_S = 0.2
"""Maximum time that one call into the kernel blocks, in seconds. The deadline is checked between calls."""
TIMEVAL = struct.Struct("@ll")
MAX_EXPECTED = 16
"""Maximum number of sessions whose workers may connect. The oldest is dropped first, since workers of failed
sessions no longer connect."""


class ConnectionRequest(msgspec.Struct, frozen=True, tag="connect"):
    """Only message of a worker: its rank, and the secret of its session."""

    secret: bytes
    rank: int


class TcpConnection:
    """Connection between two ranks.

    It blocks in the kernel, a tick at a time, until its deadline.
    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket, self._timeout_s = connection, timeout_s
        self._send_moved_at: float | None = None
        """Time when the send in progress last moved a byte. None if there is none."""
        # The buffers keep the kernel's default size, because they then grow further than with a size that is
        # set.
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, TIMEVAL.pack(0, int(TICK_S * 1e6)))

    def send(self, memory: memoryview) -> None:
        """Return once the kernel has all bytes.

        Raises:
            OSError: The connection is broken or shut, or at the deadline.
        """
        self._send_moved_at = time.monotonic()
        try:
            self._move(memory, self._send_some)
        finally:
            self._send_moved_at = None

    def blocked_s(self) -> float:
        """Return how long the send in progress has moved no byte. 0 if there is none. Thread-safe."""
        moved_at = self._send_moved_at
        return 0.0 if moved_at is None else time.monotonic() - moved_at

    def receive(self, memory: memoryview) -> None:
        """Fill the memory. Raises as `send` does."""
        # Not MSG_WAITALL: bytes that trickle in may keep it in the kernel beyond the tick, and so beyond the
        # deadline.
        self._move(memory, self._socket.recv_into)

    def shut(self) -> None:
        """Shut the connection down, from any thread.

        Every call that blocks on it, here and at the other end, raises at once.
        """
        with contextlib.suppress(OSError):  # already broken or closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self._socket.close()

    def _send_some(self, memory: memoryview) -> int:
        num_sent = self._socket.send(memory)
        self._send_moved_at = time.monotonic()
        return num_sent

    def _move(self, memory: memoryview, step: Callable[[memoryview], int]) -> None:
        deadline = time.monotonic() + self._timeout_s
        num_bytes = memory.nbytes
        while memory.nbytes:
            try:
                num_moved = step(memory)
            except BlockingIOError:  # a tick has passed
                num_moved = None
            if num_moved == 0:
                raise ConnectionResetError("the peer closed the connection")
            memory = memory[num_moved or 0 :]
            if memory.nbytes and time.monotonic() > deadline:
                raise TimeoutError(f"{memory.nbytes} of {num_bytes} bytes were not transferred in time")


class WorkerConnections:
    """Workers that have connected with the secret of a session, for the rank before them to collect."""

    def __init__(self) -> None:
        self._peers: dict[bytes, dict[int, TcpConnection | None]] = {}
        self._timeouts_s: dict[bytes, float] = {}
        self._changed = threading.Condition()

    def expect(self, ranks: Collection[int], timeout_s: float, secret: bytes | None = None) -> bytes:
        """Let these ranks of a session connect from now on, and return its secret, a new one by default."""
        secret = secret or secrets.token_bytes(SECRET_BYTES)
        with self._changed:
            self._peers[secret] = dict.fromkeys(ranks)
            self._timeouts_s[secret] = timeout_s
            while len(self._peers) > MAX_EXPECTED:
                self._forget(next(iter(self._peers)))
        return secret

    def admit(self, connection: socket.socket, request: ConnectionRequest) -> None:
        """Assign a connection to its rank.

        A worker with a wrong secret or a taken rank is not admitted. Its connection stays with the owner.
        """
        with self._changed:
            secret = next((known for known in self._peers if hmac.compare_digest(known, request.secret)), None)
            if secret is None or self._peers[secret].get(request.rank, connection) is not None:
                return
            peer = TcpConnection(connection.dup(), self._timeouts_s[secret])
            # Sent before rank 0 sees the connection, because weights could otherwise precede it. One byte
            # never fills the buffer.
            peer.send(memoryview(ADMITTED))
            self._peers[secret][request.rank] = peer
            self._changed.notify_all()

    def collect(
        self, secret: bytes, ranks: Collection[int], check: Callable[[], None], timeout_s: float
    ) -> dict[int, TcpConnection]:
        """Return the connections of these ranks, and close those of others of the session.

        Raises:
            PushError: At the deadline, or if `check` raises it.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while missing := self._missing(secret, ranks):
                check()
                if time.monotonic() > deadline:
                    raise PushError(
                        f"{missing} did not connect within {timeout_s:g} s (learner.weight_sync.timeout_s); make the "
                        "learner's port for weight syncs reachable from the server's machine "
                        "(learner.weight_sync.ports, learner.weight_sync.advertise)"
                    )
        except PushError:
            self.forget(secret)
            raise
        with self._changed:
            found = {rank: self._peers[secret].pop(rank) for rank in ranks}
            self._forget(secret)
        return {rank: peer for rank, peer in found.items() if peer is not None}

    def forget(self, secret: bytes) -> None:
        """Admit no more workers of a session, and close the connections of those that were not collected."""
        with self._changed:
            self._forget(secret)

    def close(self) -> None:
        """Close all connections that were not collected."""
        with self._changed:
            for secret in list(self._peers):
                self._forget(secret)

    def _missing(self, secret: bytes, ranks: Collection[int]) -> str:
        with self._changed:
            if secret not in self._peers:
                raise PushError("the learner's rendezvous no longer waits for the workers of this session")
            missing = [f"rank {rank}" for rank in ranks if self._peers[secret].get(rank) is None]
            if missing:
                self._changed.wait(TICK_S)
        return ", ".join(missing)

    def _forget(self, secret: bytes) -> None:
        self._timeouts_s.pop(secret, None)
        for peer in self._peers.pop(secret, {}).values():
            if peer is not None:
                peer.close()


class WorkerPort:
    """Port of a worker, at which the next rank connects."""

    def __init__(self, host: str, secret: bytes, next_rank: int, timeout_s: float) -> None:
        self.connections = WorkerConnections()
        self.connections.expect([next_rank], timeout_s, secret)
        self._port = Port(host, (0,), self._admit)
        self.number = self._port.number

    def close(self) -> None:
        """Stop listening, and close a connection that was not collected."""
        self._port.close()
        self.connections.close()

    def _admit(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            self.connections.admit(
                connection, msgspec.json.decode(lines.readline(MAX_LINE_BYTES), type=ConnectionRequest)
            )


def connect_to(
    host: str, port: int, request: ConnectionRequest, connect_timeout_s: float, timeout_s: float
) -> TcpConnection:
    """Return a worker's connection to the rank that sends to it, whose later deadlines are `timeout_s`.

    Raises:
        OSError: Nothing answers in `connect_timeout_s`, or the peer does not admit the worker.
    """
    connection = socket.socket(socket.AF_INET6 if needs_ipv6(host) else socket.AF_INET, socket.SOCK_STREAM)
    answer = bytearray(len(ADMITTED))
    try:
        connection.settimeout(connect_timeout_s)
        connection.connect((host, port))
        connection.sendall(msgspec.json.encode(request) + b"\n")
        if connection.recv_into(answer) == 0:
            raise ConnectionResetError("the peer closed the connection")
        if bytes(answer) != ADMITTED:
            raise ConnectionAbortedError(
                f"the process at {join_address(host, port)} is not a rank of the session: it sent {bytes(answer)!r}, "
                f"expected {ADMITTED!r}"
            )
        return TcpConnection(connection, timeout_s)
    except OSError:
        connection.close()
        raise


def connect_to_learner(host: str, port: int, request: ConnectionRequest, timeout_s: float) -> TcpConnection:
    """Return a worker's connection to rank 0.

    Raises:
        PushError: Nothing answers, or the peer does not admit the worker.
    """
    try:
        return connect_to(host, port, request, timeout_s, timeout_s)
    except OSError as error:
        raise PushError(
            f"rank {request.rank} could not open a connection for weights to the learner at "
            f"{join_address(host, port)}: {error or 'no answer'} (deadline {timeout_s:g} s, "
            f"learner.weight_sync.timeout_s; the address is learner.weight_sync.advertise)"
        ) from error
