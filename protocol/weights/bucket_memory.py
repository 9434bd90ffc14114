"""The memory that buckets arrive in, used again from push to push.

Fresh host memory costs more than the transfer that fills it, for the kernel gives it page by page and zeroed: a broadcast of
1 GiB over the loopback runs at a third of its speed. Invariant: memory is lent again only when no tensor refers to it any
more, however long whoever loads a bucket keeps a view of it.
"""

import weakref

import torch

from protocol.messages import Manifest
from protocol.weights.buckets import ALIGNMENT_BYTES, cut

MOST_BUCKETS = 2.25
"""What is kept, in full buckets: one arrives while one is loaded. A tensor larger than a bucket may have all of it."""


class BucketMemory:
    """Lends buffers for the buckets of one manifest out of one piece of memory."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._device = device
        sizes = [_aligned(bucket.num_bytes) for bucket in cut(manifest)]
        self._num_bytes = min(sum(sizes), max(int(MOST_BUCKETS * manifest.bucket_bytes), max(sizes, default=0)))
        # What no bucket has used yet takes no memory.
        self._whole = torch.empty(self._num_bytes if device.type == "cpu" else 0, dtype=torch.uint8).numpy().data
        self._loans: dict[int, int] = {}
        """First byte and end of each."""

    def has_room(self, num_bytes: int) -> bool:
        """Whether a buffer can be lent without taking fresh memory."""
        return self._device.type != "cpu" or self._gap(num_bytes) is not None

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return a flat uint8 buffer; it comes back by itself with the last tensor that refers to it."""
        start = self._gap(num_bytes)
        if self._device.type != "cpu" or num_bytes == 0 or start is None:  # torch itself keeps what was freed on a GPU
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        loan = self._whole[start : start + num_bytes]
        self._loans[start] = start + _aligned(num_bytes)
        # The loan lives as long as the storage of the tensor below, which all views of it share.
        weakref.finalize(loan, self._loans.pop, start).atexit = False
        return torch.frombuffer(loan, dtype=torch.uint8)

    def _gap(self, num_bytes: int) -> int | None:
        """Return where that many bytes are free."""
        start = 0
        for taken, end in sorted(self._loans.copy().items()):  # a copy, for any may come back meanwhile
            if taken - start >= num_bytes:
                break
            start = end
        return start if start + num_bytes <= self._num_bytes else None


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
