"""Connections for weights, from the server's workers to the learner's port.

    worker ── secret, rank ──▶ the learner's port (rendezvous.py) ──▶ WorkerConnections ──▶ rank 0

The secret of the session travels only in the rendezvous. No connection goes the other way, so address
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
from collections.abc import Callable

import msgspec

from protocol.endpoint import join_address, needs_ipv6
from protocol.errors import PushError

SECRET_BYTES = 32
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
    """Connection between rank 0 and another rank.

    It blocks in the kernel, a tick at a time, until its deadline.
    """

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket, self._timeout_s = connection, timeout_s
        # The buffers keep the kernel's default size, because they then grow further than with a size that is
        # set.
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, TIMEVAL.pack(0, int(TICK_S * 1e6)))

    def send(self, memory: memoryview) -> None:
        """Return once the kernel has all bytes.

        Raises:
            OSError: If the connection is broken or shut, or at the deadline.
        """
        self._move(memory, self._socket.send)

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
    """Workers that have connected with the secret of a session, for rank 0 to collect."""

    def __init__(self) -> None:
        self._peers: dict[bytes, dict[int, TcpConnection | None]] = {}
        self._timeouts_s: dict[bytes, float] = {}
        self._changed = threading.Condition()

    def expect(self, world_size: int, timeout_s: float) -> bytes:
        """Return the secret of a new session, whose workers may connect from now on."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with self._changed:
            self._peers[secret] = dict.fromkeys(range(1, world_size))
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

    def collect(self, secret: bytes, check: Callable[[], None], timeout_s: float) -> list[TcpConnection]:
        """Return the connections of all workers, which connect once all ranks have met.

        Raises:
            PushError: At the deadline, or if `check` raises it.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while missing := self._missing(secret):
                check()
                if time.monotonic() > deadline:
                    raise PushError(
                        f"{missing} did not connect within {timeout_s:g} s (learner.weight_sync.timeout_s); make the "
                        "learner's port for weight syncs reachable from the server's machine "
                        "(learner.weight_sync.ports, learner.weight_sync.advertise)"
                    )
        except PushError:
            with self._changed:
                self._forget(secret)
            raise
        with self._changed:
            del self._timeouts_s[secret]
            return [peer for peer in self._peers.pop(secret).values() if peer is not None]

    def close(self) -> None:
        """Close all connections that were not collected."""
        with self._changed:
            for secret in list(self._peers):
                self._forget(secret)

    def _missing(self, secret: bytes) -> str:
        with self._changed:
            if secret not in self._peers:
                raise PushError("the learner's rendezvous no longer waits for the workers of this session")
            missing = [f"rank {rank}" for rank, peer in self._peers[secret].items() if peer is None]
            if missing:
                self._changed.wait(TICK_S)
        return ", ".join(missing)

    def _forget(self, secret: bytes) -> None:
        self._timeouts_s.pop(secret, None)
        for peer in self._peers.pop(secret, {}).values():
            if peer is not None:
                peer.close()


def connect_to_learner(host: str, port: int, request: ConnectionRequest, timeout_s: float) -> TcpConnection:
    """Return a worker's connection to rank 0.

    Raises:
        PushError: If nothing answers, or the peer does not admit the worker.
    """
    where = join_address(host, port)
    connection = socket.socket(socket.AF_INET6 if needs_ipv6(host) else socket.AF_INET, socket.SOCK_STREAM)
    answer = bytearray(len(ADMITTED))
    try:
        connection.settimeout(timeout_s)
        connection.connect((host, port))
        connection.sendall(msgspec.json.encode(request) + b"\n")
        peer = TcpConnection(connection, timeout_s)
        peer.receive(memoryview(answer))
    except OSError as error:
        connection.close()
        raise PushError(
            f"rank {request.rank} could not open a connection for weights to the learner at {where}: "
            f"{error or 'no answer'} (deadline {timeout_s:g} s, learner.weight_sync.timeout_s; the address is "
            "learner.weight_sync.advertise)"
        ) from error
    if bytes(answer) != ADMITTED:
        peer.close()
        raise PushError(f"the process at {where} is not the learner: it sent {bytes(answer)!r}, expected {ADMITTED!r}")
    return peer
