"""Watches the memory that this process uses during an attack: what malloc keeps of freed memory does not count.

Connections that come and go by the ten thousand leave up to 230 MiB of it, which malloc uses again.
"""

import ctypes
import threading
import time
from collections.abc import Callable

import psutil

INTERVAL_S = 0.05


class MemoryWatch:
    """Samples from its making until `stop`; `num_messages` says how many have come so far."""

    def __init__(self, num_messages: Callable[[], int]) -> None:
        self._num_messages = num_messages
        self._samples: list[tuple[int, float]] = []
        self._began_at, self.seconds = time.monotonic(), 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            ctypes.CDLL(None).malloc_trim(0)
            self._samples.append((self._num_messages(), psutil.Process().memory_info().rss / 2**20))

    def stop(self) -> float:
        """Return the MiB by which memory grew over the second half of the messages."""
        self._stopped.set()
        self._thread.join()
        self.seconds = time.monotonic() - self._began_at
        last = self._samples[-1][0] if self._samples else 0
        half = [mib for number, mib in self._samples if number >= last / 2]
        return half[-1] - min(half) if half else 0.0
