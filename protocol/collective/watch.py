"""A worker's watch while a push travels: whether the learner still wants it, and whether its host is still there.

    a connection to the learner's board ─▶ "called off?" ─▶ yes                                   ─▶ the collective is aborted
                                        ─▶ ended by its kernel, or not to be had                  ─▶ the collective is aborted

Nothing else tells. TCP does not notice that the host at the other end has vanished while it only receives, and within one host
NCCL notices nothing at all; the server can generate nothing until the deadline of the push. An answer may take its time: the
learner may stand still for longer than a host is silent, while it writes a checkpoint, and only its kernel has to be there.
Invariant: only the transfer that is watched is aborted.
"""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from protocol.collective.board import CALLED_OFF, MAX_LINE_BYTES, Question, was_called_off
from protocol.collective.group import Collective
from protocol.endpoint import join_address
from protocol.errors import PushError
from protocol.messages import Rendezvous

INTERVAL_S = 1.0
"""Between two questions. A push that takes less is not watched."""
DEAD_AFTER_S = 6
KEEPALIVE = {
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: DEAD_AFTER_S - 1,
    socket.TCP_USER_TIMEOUT: DEAD_AFTER_S * 1000,  # a question that is under way is sent again for minutes, unprobed
}
"""A link that loses one packet in a hundred loses so many in a row once in years of transfers."""


@contextmanager
def watched(collective: Collective, rendezvous: Rendezvous, epoch: str) -> Iterator[None]:
    """End the broadcasts soon after the learner has called the epoch off or is gone. Raises PushError that says so."""
    watch = _Watch(collective, (rendezvous.host, rendezvous.port), epoch)
    watch.start()
    try:
        yield
    except PushError as effect:
        if watch.reason is not None:
            raise PushError(f"{watch.reason}; the transfer ended in {effect}") from effect
        raise
    finally:
        watch.end()


class _Watch(threading.Thread):
    def __init__(self, collective: Collective, address: tuple[str, int], epoch: str) -> None:
        super().__init__(name="push-watch", daemon=True)
        self._collective, self._address, self._epoch = collective, address, epoch
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        """Held around the end and the abort: what comes after the end is another transfer."""
        self.reason: str | None = None
        """Why the collective was aborted."""

    def run(self) -> None:
        try:
            while not self._is_over.wait(INTERVAL_S):
                # Ended by the board while it was asked: whether the board is still there, another look tells.
                with suppress(ConnectionResetError, BrokenPipeError):
                    self._look()
        except PushError as called_off:
            self._abort(str(called_off))
        except OSError as error:
            where = join_address(*self._address)
            self._abort(f"the learner at {where} is gone or its host cannot be reached ({error})")
        except msgspec.MsgspecError as error:
            self._abort(f"what answers at {join_address(*self._address)} is not the learner ({error})")

    def _abort(self, reason: str) -> None:
        with self._lock:
            if not self._is_over.is_set():
                self.reason = reason
                self._collective.abort()

    def _look(self) -> None:
        """Ask until the transfer is over or the board ends the connection, as it does with those that are silent for long.

        Raises PushError once the epoch is called off.
        """
        question = msgspec.json.encode(Question(self._epoch, CALLED_OFF)) + b"\n"
        with socket.create_connection(self._address, DEAD_AFTER_S) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            while not self._is_over.is_set():
                connection.sendall(question)
                answer = self._answer(connection)
                if answer is None:
                    return
                reason = msgspec.json.decode(answer, type=bytes | None)
                if reason is not None:
                    raise was_called_off(self._epoch, reason)
                self._is_over.wait(INTERVAL_S)

    def _answer(self, connection: socket.socket) -> bytes | None:
        """Wait for one line, for as long as the transfer goes on; None where there is none to come."""
        events = select.poll()
        events.register(connection, select.POLLIN)
        line = b""
        while not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
            if self._is_over.is_set():
                return None
            if events.poll(INTERVAL_S * 1000):
                part = connection.recv(MAX_LINE_BYTES)
                if not part:
                    return None
                line += part
        return line

    def end(self) -> None:
        with self._lock:
            self._is_over.set()
