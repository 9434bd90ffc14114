"""How much a peer may send before the server has welcomed it: enough for any Hello, too little to do harm."""

import time
from collections import Counter

MAX_MESSAGES_PER_S = 1_000
MAX_BYTES_PER_S = 1 << 20
"""Decoding so much takes the server tens of milliseconds, and memory of tens of MiB, whatever the bytes are."""


class Strangers:
    """Counts what strangers send within each second; what it remembers is bounded by that second's peers."""

    def __init__(self) -> None:
        self._second_began = time.monotonic()
        self._num_messages: Counter[bytes] = Counter()
        self._num_bytes: Counter[bytes] = Counter()

    def allow(self, peer: bytes, num_bytes: int) -> bool:
        """Count a message; False when its sender has had its share of this second."""
        now = time.monotonic()
        if now - self._second_began > 1:
            self._second_began = now
            self._num_messages.clear()
            self._num_bytes.clear()
        self._num_messages[peer] += 1
        self._num_bytes[peer] += num_bytes
        return self._num_messages[peer] <= MAX_MESSAGES_PER_S and self._num_bytes[peer] <= MAX_BYTES_PER_S
