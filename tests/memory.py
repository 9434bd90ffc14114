"""Watches the memory that this process uses during an attack: what malloc keeps of freed memory does not count.

Connections that come and go by the ten thousand leave up to 230 MiB of it, which malloc uses again.
"""

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np
import psutil

from tests.bench.flatness import theil_sen

INTERVAL_S = 0.02
MAX_SAMPLES = 1000


class MemoryWatch:
    """Samples from its making until `stop`; `num_messages` says how many have come so far."""

    def __init__(self, num_messages: Callable[[], int]) -> None:
        self._num_messages = num_messages
        self._process = psutil.Process()
        self._samples: dict[int, float] = {}
        self._began_at = self.seconds = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            num_messages = self._num_messages()
            if num_messages and num_messages not in self._samples:
                self._began_at = self._began_at or time.monotonic()
                self.seconds = time.monotonic() - self._began_at
                ctypes.CDLL(None).malloc_trim(0)
                self._samples[num_messages] = self._process.memory_info().rss / 2**20

    def stop(self) -> float:
        """Return the MiB by which memory grew over the second half of the messages, by a robust fit."""
        self._stopped.set()
        self._thread.join()
        last = max(self._samples)
        half = [(number, mib) for number, mib in self._samples.items() if number >= last / 2]
        if len(half) < 2:  # an attack of an instant
            return 0.0
        numbers_N, mib_N = np.array(half[:: 1 + len(half) // MAX_SAMPLES]).T
        return theil_sen(numbers_N, mib_N) * last / 2
