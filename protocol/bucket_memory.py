"""The memory that buckets arrive in, used again from push to push.

Fresh host memory costs more than the transfer that fills it, for the kernel gives it page by page and zeroed: a broadcast of
1 GiB over the loopback runs at a third of its speed. Invariant: memory is lent again only when no tensor refers to it any
more, however long whoever loads a bucket keeps a view of it.
"""

import weakref

import torch

from protocol.buckets import cut
from protocol.messages import Manifest

NUM_SPARE = 3
"""Buffers kept while nobody uses them: one arrives, one is checked, one is loaded."""


class BucketMemory:
    """Lends buffers for the buckets of one manifest, and keeps some of what comes back."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._device = device
        self._most_bytes = max((bucket.num_bytes for bucket in cut(manifest)), default=0)
        self._spare: list[torch.Tensor] = []

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return a flat uint8 buffer; it comes back by itself with the last tensor that refers to it."""
        if self._device.type != "cpu":  # torch itself keeps what was freed on a GPU
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # Of the size of the largest, so that any fits any bucket; what a bucket does not use costs no memory.
        whole = self._spare.pop() if self._spare else torch.empty(self._most_bytes, dtype=torch.uint8)
        loan = whole.numpy().data
        # The loan lives as long as the storage of the tensor below, which all views of it share.
        weakref.finalize(loan, self._take_back, whole).atexit = False
        return torch.frombuffer(loan, dtype=torch.uint8, count=num_bytes)

    def _take_back(self, whole: torch.Tensor) -> None:
        if len(self._spare) < NUM_SPARE:
            self._spare.append(whole)
