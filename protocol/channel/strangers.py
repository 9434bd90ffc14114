"""How much a peer may send before the server has welcomed it: enough for any Hello, too little to do harm."""

import time
from collections import Counter, deque

MAX_MESSAGES_PER_S = 1_000
NUM_REMEMBERED = 1_000
MAX_BYTES_PER_S = 1 << 20
"""Decoding so much takes the server tens of milliseconds, and memory of tens of MiB, whatever the bytes are."""


class Strangers:
    """Counts what strangers send within each second, and remembers the last ones that were cut off."""

    def __init__(self) -> None:
        self._second_began = time.monotonic()
        self._num_messages: Counter[bytes] = Counter()
        self._num_bytes: Counter[bytes] = Counter()
        self._cut_off: deque[bytes] = deque(maxlen=NUM_REMEMBERED)

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

    def is_cut_off(self, peer: bytes) -> bool:
        """Whether the connection was ended before; what the peer had sent until then may still come out of the queue."""
        return peer in self._cut_off

    def cut_off(self, peer: bytes) -> None:
        self._cut_off.append(peer)
