"""A worker's watch while a push travels: whether the learner's host is still there.

    a connection to the learner's board ─▶ ended by its kernel, or not to be had ─▶ the collective is aborted

Nothing else tells: TCP does not notice that the host at the other end has vanished while it only receives, and the server can
generate nothing until the deadline of the push. Kernels are asked, not the learner, which may stand still for longer than a
host is silent, while it writes a checkpoint. Invariant: only the transfer that is watched is aborted.
"""

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from protocol.collective.group import Collective
from protocol.errors import PushError
from protocol.messages import Rendezvous

INTERVAL_S = 1.0
"""A push that takes less is not watched."""
DEAD_AFTER_S = 6
KEEPALIVE = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: DEAD_AFTER_S - 1}
"""A link that loses one packet in a hundred loses so many in a row once in years of transfers."""


@contextmanager
def watched(collective: Collective, rendezvous: Rendezvous) -> Iterator[None]:
    """End the broadcasts within soon after the learner or its host is gone. Raises PushError that says so."""
    watch = _Watch(collective, (rendezvous.host, rendezvous.port))
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
    def __init__(self, collective: Collective, address: tuple[str, int]) -> None:
        super().__init__(name="push-watch", daemon=True)
        self._collective, self._address = collective, address
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        """Held around the end and the abort: what comes after the end is another transfer."""
        self.reason: str | None = None
        """Why the collective was aborted."""

    def run(self) -> None:
        try:
            while not self._is_over.wait(INTERVAL_S):
                self._look()
        except OSError as error:
            with self._lock:
                if not self._is_over.is_set():
                    host, port = self._address
                    self.reason = f"the learner at {host}:{port} is gone or its host cannot be reached ({error})"
                    self._collective.abort()

    def _look(self) -> None:
        """Hold a connection until the transfer is over or the board ends it, as it does with all that are silent."""
        with socket.create_connection(self._address, DEAD_AFTER_S) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            events = select.poll()
            events.register(connection, select.POLLIN)
            while not self._is_over.is_set():
                if events.poll(INTERVAL_S * 1000) and not connection.recv(1):
                    return

    def end(self) -> None:
        with self._lock:
            self._is_over.set()
