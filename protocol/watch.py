"""A worker's watch while a push travels: whether the learner is there and stands by the epoch.

    once a second: the learner's board ─▶ no answer, or the epoch was called off ─▶ the collective is aborted

Nothing else tells: TCP does not know that the host at its other end has vanished, and a collective waits out its deadline for
a learner that is stopped, while the server can generate nothing. Invariant: only the transfer that is watched is aborted.
"""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from protocol.board import EpochStore, RemoteBoard
from protocol.collective import ANSWER_TIMEOUT_S, Collective
from protocol.errors import PushFailed
from protocol.messages import Rendezvous

INTERVAL_S = 1.0
"""A push that takes less asks nothing."""


@contextmanager
def watched(collective: Collective, epoch: str, rendezvous: Rendezvous) -> Iterator[None]:
    """End the broadcasts within soon after the learner is gone or stopped. Raises PushFailed that says so."""
    watch = _Watch(collective, epoch, rendezvous)
    watch.start()
    try:
        yield
    except PushFailed as effect:
        if watch.reason is not None:
            raise PushFailed(f"{watch.reason}; the transfer ended in {effect}") from effect
        raise
    finally:
        watch.end()


class _Watch(threading.Thread):
    def __init__(self, collective: Collective, epoch: str, rendezvous: Rendezvous) -> None:
        super().__init__(name="push-watch", daemon=True)
        self._collective, self._epoch, self._rendezvous = collective, epoch, rendezvous
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        """Held around the end and the abort: what comes after the end is another transfer."""
        self.reason: str | None = None
        """Why the collective was aborted."""

    def run(self) -> None:
        try:
            self._ask_until_over()
        except PushFailed as failure:
            with self._lock:
                if not self._is_over.is_set():
                    self.reason = str(failure)
                    self._collective.abort()

    def _ask_until_over(self) -> None:
        if self._is_over.wait(INTERVAL_S):
            return
        host, port, timeout_s = self._rendezvous.host, self._rendezvous.port, self._rendezvous.timeout_s
        with closing(RemoteBoard(host, port, min(ANSWER_TIMEOUT_S, timeout_s))) as board:
            store = EpochStore(self._epoch, board, timeout_s)
            while not self._is_over.wait(INTERVAL_S):
                store.check_not_called_off()

    def end(self) -> None:
        with self._lock:
            self._is_over.set()
