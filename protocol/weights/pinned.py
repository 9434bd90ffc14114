"""Pinned host memory of exactly the wanted size, for copies of weights outside a GPU."""

import mmap

import torch


class PinnedPages(mmap.mmap):
    """Host memory of a tensor that a GPU reads and writes directly, pinned as long as the tensor is used.

    torch's `pin_memory=True` rounds each tensor up to a power of two: the moments of 7 billion parameters would take
    108 GiB in place of the planned 57.
    """

    _address: int | None = None

    def pin(self) -> None:
        """Pin the pages. Raises torch.cuda.CudaError if the driver cannot."""
        cudart, address = torch.cuda.cudart(), torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        torch.cuda.check_error(cudart.cudaHostRegister(address, len(self), 1))  # 1: in the context of every GPU
        self._address, self._unpin = address, cudart.cudaHostUnregister

    def __del__(self) -> None:
        if self._address is not None:
            self._unpin(self._address)


def empty_in_host_memory(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor in host memory, pinned if CUDA is available."""
    if not torch.cuda.is_available() or not shape.numel():
        return torch.empty(shape, dtype=dtype, device="cpu")
    pages = PinnedPages(-1, shape.numel() * dtype.itemsize)
    pages.pin()
    return torch.frombuffer(pages, dtype=dtype).view(shape)
