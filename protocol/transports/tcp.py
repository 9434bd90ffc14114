"""The collective over one port of the learner: rank 0 sends each worker the same bytes, on the line that the worker has opened.

    rank 0 ══ line 1 ══▶ rank 1          of each broadcast first its length, in 8 bytes, then its bytes
           ══ line 2 ══▶ rank 2

Bytes go from and into the memory of the tensors. One thread a line does one broadcast after the other, in the order in which
they were begun. Each worker calls the learner's port with a secret of the epoch, which travels in the rendezvous only; nothing is
called the other way, so address translation on either side is no obstacle.

Invariants: a line that has failed once carries nothing more, because its place in the stream is unknown; only a caller that has shown
the secret gets a place among the ranks.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait

import msgspec
import torch

from protocol.endpoint import join_address, needs_ipv6
from protocol.errors import PushError

SECRET_BYTES = 32
LET_IN = b"+"
TICK_S = 0.2
"""The longest that one call into the kernel blocks; between two the deadline is looked at."""
TIMEVAL = struct.Struct("@ll")
MAX_EXPECTED = 16
"""Epochs whose workers may call; those of one that failed before do not come any more, and the oldest is forgotten first."""
LENGTH = struct.Struct("<Q")


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A worker's first and only line: it is this rank of the epoch that has this secret."""

    secret: bytes
    rank: int


class Line:
    """One connection between rank 0 and another rank. Blocks in the kernel, a tick at a time, until its deadline."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket, self._timeout_s = connection, timeout_s
        # The buffers keep the kernel's own size: it lets them grow further than a size that is set.
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, TIMEVAL.pack(0, int(TICK_S * 1e6)))

    def send(self, memory: memoryview) -> None:
        """Return once the kernel has all of it. Raises OSError when the line is broken or shut, and at the deadline."""
        self._move(memory, self._socket.send)

    def receive(self, memory: memoryview) -> None:
        """Fill the memory. Raises as `send` does."""
        # Not MSG_WAITALL: bytes that trickle in may keep it in the kernel beyond the tick, and so beyond the deadline.
        self._move(memory, self._socket.recv_into)

    def shut(self) -> None:
        """From any thread: whatever blocks on the line, here and at the other end, raises at once."""
        with contextlib.suppress(OSError):  # broken or closed before
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
                raise ConnectionResetError("the other side has ended the connection")
            memory = memory[num_moved or 0 :]
            if memory.nbytes and time.monotonic() > deadline:
                raise TimeoutError(f"{memory.nbytes} of {num_bytes} bytes did not pass in time")


class Callers:
    """The workers that have called and shown the secret of an epoch, until rank 0 collects them."""

    def __init__(self) -> None:
        self._lines: dict[bytes, dict[int, Line | None]] = {}
        self._timeouts_s: dict[bytes, float] = {}
        self._changed = threading.Condition()

    def expect(self, world_size: int, timeout_s: float) -> bytes:
        """Return the secret of a new epoch, whose workers may call from now on."""
        secret = secrets.token_bytes(SECRET_BYTES)
        with self._changed:
            self._lines[secret] = dict.fromkeys(range(1, world_size))
            self._timeouts_s[secret] = timeout_s
            while len(self._lines) > MAX_EXPECTED:
                self._forget(next(iter(self._lines)))
        return secret

    def admit(self, connection: socket.socket, call: Call) -> None:
        """Give the caller its place; one who has none is left to whoever has the connection, and takes up nobody's."""
        with self._changed:
            secret = next((known for known in self._lines if hmac.compare_digest(known, call.secret)), None)
            if secret is None or self._lines[secret].get(call.rank, connection) is not None:
                return
            line = Line(connection.dup(), self._timeouts_s[secret])
            # Before rank 0 can see the line, whose bytes would else come first. One byte never fills a line.
            line.send(memoryview(LET_IN))
            self._lines[secret][call.rank] = line
            self._changed.notify_all()

    def collect(self, secret: bytes, check: Callable[[], None], timeout_s: float) -> list[Line]:
        """Wait for all workers; they call once all ranks have met. Raises PushError at the deadline, or what `check` raises."""
        deadline = time.monotonic() + timeout_s
        try:
            while missing := self._missing(secret):
                check()
                if time.monotonic() > deadline:
                    raise PushError(
                        f"these did not call within {timeout_s:g} s (learner.push.timeout_s): {missing}; let the server's "
                        "machine reach the learner's port for pushes (learner.push.ports, learner.push.advertise)"
                    )
        except PushError:
            with self._changed:
                self._forget(secret)
            raise
        with self._changed:
            del self._timeouts_s[secret]
            return [line for line in self._lines.pop(secret).values() if line is not None]

    def close(self) -> None:
        """Hang up on all that nobody has collected."""
        with self._changed:
            for secret in list(self._lines):
                self._forget(secret)

    def _missing(self, secret: bytes) -> str:
        with self._changed:
            if secret not in self._lines:
                raise PushError("the learner's rendezvous no longer waits for the workers of this epoch")
            missing = [f"rank {rank}" for rank, line in self._lines[secret].items() if line is None]
            if missing:
                self._changed.wait(TICK_S)
        return ", ".join(missing)

    def _forget(self, secret: bytes) -> None:
        self._timeouts_s.pop(secret, None)
        for line in self._lines.pop(secret, {}).values():
            if line is not None:
                line.close()


def call_learner(host: str, port: int, call: Call, timeout_s: float) -> Line:
    """Return the line of a worker to rank 0. Raises PushError where nobody answers, or one who does not let it in."""
    where = join_address(host, port)
    connection = socket.socket(socket.AF_INET6 if needs_ipv6(host) else socket.AF_INET, socket.SOCK_STREAM)
    answer = bytearray(len(LET_IN))
    try:
        connection.settimeout(timeout_s)
        connection.connect((host, port))
        connection.sendall(msgspec.json.encode(call) + b"\n")
        line = Line(connection, timeout_s)
        line.receive(memoryview(answer))
    except OSError as error:
        connection.close()
        raise PushError(
            f"rank {call.rank} got no line for weights from the learner at {where}: {error or 'no answer'} "
            f"(deadline {timeout_s:g} s, learner.push.timeout_s; the address is learner.push.advertise)"
        ) from error
    if bytes(answer) != LET_IN:
        line.close()
        raise PushError(f"what answers at {where} is not the learner: it sent {bytes(answer)!r}, expected {LET_IN!r}")
    return line


class TcpCollective:
    """Broadcasts over the lines of one epoch: rank 0 has one to each worker, a worker the one to rank 0."""

    device = torch.device("cpu")
    sends_in_place = True

    def __init__(self, lines: Sequence[Line], epoch: str, rank: int, timeout_s: float) -> None:
        self._lines, self._epoch, self._rank, self._timeout_s = lines, epoch, rank, timeout_s
        self._threads = [ThreadPoolExecutor(1, "push-line") for _ in lines]

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.start_broadcast(tensor)()

    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        memory = tensor.numpy().data
        move = self._send if self._rank == 0 else self._receive
        try:
            under_way = [
                thread.submit(move, line, memory) for thread, line in zip(self._threads, self._lines, strict=True)
            ]
        except RuntimeError as error:
            raise PushError(f"the collective of epoch {self._epoch} is closed") from error

        def wait_for_all() -> None:
            wait(under_way, return_when=FIRST_EXCEPTION)
            try:
                for transfer in under_way:
                    transfer.result()
            except CancelledError as error:
                raise PushError(f"the collective of epoch {self._epoch} is closed") from error
            except OSError as error:
                wait(under_way)  # they end at once, all lines being shut, and read the tensor until then
                raise PushError(
                    f"broadcast of {tensor.nbytes} bytes in epoch {self._epoch} failed: {error} "
                    f"(deadline {self._timeout_s:g} s, learner.push.timeout_s)"
                ) from error

        return wait_for_all

    def abort(self) -> None:
        for line in self._lines:
            line.shut()

    def close(self) -> None:
        self.abort()
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        for line in self._lines:
            line.close()

    def _send(self, line: Line, memory: memoryview) -> None:
        try:
            line.send(memoryview(LENGTH.pack(memory.nbytes)))
            line.send(memory)
        except OSError:
            self.abort()
            raise

    def _receive(self, line: Line, memory: memoryview) -> None:
        length = bytearray(LENGTH.size)
        try:
            line.receive(memoryview(length))
            (num_bytes,) = LENGTH.unpack(length)
            if num_bytes != memory.nbytes:
                raise ConnectionAbortedError(
                    f"rank 0 broadcasts {num_bytes} bytes, rank {self._rank} expects {memory.nbytes}"
                )
            line.receive(memory)
        except OSError:
            self.abort()
            raise
