"""The exact peak of live tensor bytes in a block: every storage that an operation creates, until it is freed.

Memory inside kernels and memory kept by the allocator do not count; the benchmarks also report the peak of the process.
"""

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts live tensors, except those from before the block and those on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for found in out if isinstance(out, tuple | list) else (out,):
            tensor = found._local_tensor if isinstance(found, DTensor) else found
            if (
                isinstance(tensor, torch.Tensor)
                and not tensor.is_meta
                and tensor.untyped_storage()._cdata not in inputs
            ):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
