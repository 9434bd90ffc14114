"""Collective between processes that share one GPU, through CUDA IPC.

    rank 0: handle of the tensor ─▶ TCP ─▶ others: open, copy, synchronize ─▶ TCP barrier ─▶ rank 0 returns

The learner lends its memory, and the workers copy from it on the GPU. Only handles leave the GPU. Rank 0 may
reuse its tensor once its wait has ended. One thread runs the broadcasts in order. Each starts once the GPU
has reached the point at which the caller started it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Annotated, Any

import msgspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from protocol.errors import PushError, PushInterrupted
from protocol.transports.collective import Collective, RankContext
from protocol.transports.rendezvous import RendezvousStore
from protocol.transports.tcp import TcpCollective

HEADER_BYTES = 1024
"""Size of an encoded handle: its length in two bytes, the handle, zeros."""
MAX_OPEN_STORAGES = 6
"""Maximum number of storages kept open: the rotating buffers of a sender and its trailers. While a storage is
open here, the sender cannot free it."""
Count = Annotated[int, msgspec.Meta(ge=0)]


class TensorHandle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Location of a flat uint8 tensor in the GPU memory of another process.

    The fields are those of torch's `_share_cuda_`.
    """

    allocation: bytes
    storage_bytes: Count
    storage_offset_bytes: Count
    """Offset of the storage in the allocation."""
    ref_counter: bytes
    ref_counter_offset: Count
    event: bytes
    event_sync_required: bool
    offset_bytes: Count
    """Offset of the tensor in the storage."""
    num_bytes: Count

    def __post_init__(self) -> None:
        if self.offset_bytes + self.num_bytes > self.storage_bytes:
            raise ValueError(
                f"{self.num_bytes} bytes at offset {self.offset_bytes} exceed a storage of {self.storage_bytes} bytes"
            )


def encode_handle(handle: TensorHandle) -> torch.Tensor:
    """Return the handle as a CPU tensor of HEADER_BYTES."""
    encoded = msgspec.msgpack.encode(handle)
    if len(encoded) > HEADER_BYTES - 2:
        raise PushError(f"a CUDA handle of {len(encoded)} bytes does not fit in {HEADER_BYTES - 2} bytes")
    header = len(encoded).to_bytes(2, "little") + encoded
    return torch.frombuffer(bytearray(header.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def decode_handle(header: torch.Tensor) -> TensorHandle:
    """Return the handle that `encode_handle` wrote. Raises PushError on anything else."""
    data = header.numpy().tobytes()
    length = int.from_bytes(data[:2], "little")
    try:
        return msgspec.msgpack.decode(data[2 : 2 + length], type=TensorHandle)
    except msgspec.DecodeError as error:
        raise PushError(f"rank 0 sent {length} bytes that are not a CUDA handle: {error}") from error


def has_expandable_segments(environment: Mapping[str, str]) -> bool:
    """Return whether torch's allocator uses expandable segments.

    CUDA IPC can lend only memory from cudaMalloc, and these segments are allocated differently.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:true" in environment.get(name, "").lower() for name in names)


class GpuMemory:
    """GPU operations of the exchange: lend, open, wait, take back."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._idle = device, torch.cuda.Stream(device)

    def lend(self, tensor: torch.Tensor) -> TensorHandle:
        """Return a handle of the tensor's storage, whose contents must be complete.

        The borrower waits for the event that torch records on the current stream, which may be the one that trains.
        """
        storage = tensor.untyped_storage()
        with torch.cuda.stream(self._idle):
            _, allocation, size, offset, ref_counter, ref_counter_offset, event, event_sync = storage._share_cuda_()
        return TensorHandle(
            allocation=allocation, storage_bytes=size, storage_offset_bytes=offset,
            ref_counter=ref_counter, ref_counter_offset=ref_counter_offset, event=event, event_sync_required=event_sync,
            offset_bytes=int(tensor.storage_offset()), num_bytes=tensor.nbytes,
        )  # fmt: skip

    def open(self, handle: TensorHandle) -> torch.Tensor:
        """Return the whole storage of the handle as a tensor."""
        storage = torch.UntypedStorage._new_shared_cuda(
            self._device.index, handle.allocation, handle.storage_bytes, handle.storage_offset_bytes,
            handle.ref_counter, handle.ref_counter_offset, handle.event, handle.event_sync_required,
        )  # fmt: skip
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)

    def take_back(self, handle: TensorHandle) -> None:
        """Release a loan without waiting for the borrower, which may be dead.

        Otherwise, the memory would never become free.
        """
        torch.UntypedStorage._release_ipc_counter(handle.ref_counter, handle.ref_counter_offset, device=self._device)

    def mark(self) -> Any:
        """Return an event whose synchronize() waits for all that this thread has queued."""
        return torch.cuda.current_stream(self._device).record_event()

    def synchronize(self) -> None:
        """Wait until all that this thread has queued is done."""
        torch.cuda.current_stream(self._device).synchronize()

    def collect(self) -> None:
        """Free memory that was lent and has been returned."""
        torch.cuda.ipc_collect()


class IpcCollective(Collective):
    """Broadcasts within one GPU.

    TCP connections of the same session carry handles and acknowledgments.
    """

    between_gpus = True
    secret_bytes = TcpCollective.secret_bytes
    sends_in_place = False
    """False, because each storage of the model would have to be lent and opened. A copy within the GPU costs
    almost nothing."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._chain, self._memory = TcpCollective(context), GpuMemory(context.device)
        self._thread = ThreadPoolExecutor(1, "push-transfer")
        self._lent: dict[int, tuple[StorageWeakRef, TensorHandle]] = {}
        self._opened: dict[tuple[bytes, int, int], torch.Tensor] = {}

    @classmethod
    def needs(cls) -> str:
        return "an NVIDIA GPU on both sides, without expandable_segments in PYTORCH_ALLOC_CONF"

    @classmethod
    def why_not_here(cls) -> str | None:
        return f"transport ipc needs {cls.needs()}" if has_expandable_segments(os.environ) else None

    @classmethod
    def obstacle(cls, devices: Sequence[str], is_explicit: bool) -> str | None:
        return "it needs the learner and all workers on the same GPU of one host" if len(set(devices)) > 1 else None

    @classmethod
    def new_secret(cls, store: RendezvousStore, world_size: int, timeout_s: float) -> bytes:
        return TcpCollective.new_secret(store, world_size, timeout_s)

    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        try:
            # wait() removes the future from the list. A stored failure whose traceback leads back to the
            # future is a cycle. It would keep the tensor, and the learner's GPU memory, until Python collects
            # cycles.
            under_way = [self._thread.submit(self._transfer, tensor, self._memory.mark())]
        except RuntimeError as error:
            raise PushInterrupted(f"the collective on {self.device} is closed") from error

        def wait() -> None:
            try:
                under_way.pop().result()
            except CancelledError as error:
                raise PushInterrupted(f"the collective on {self.device} was closed") from error

        return wait

    def _transfer(self, tensor: torch.Tensor, ready: Any) -> None:
        try:
            # This thread has its own stream, which is not ordered after the caller's queued work on this
            # memory.
            ready.synchronize()
            if self._rank == 0:
                self._chain.broadcast(encode_handle(self._lend(tensor)))
            else:
                header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
                self._chain.broadcast(header)
                self._copy(decode_handle(header), tensor)
            self._chain.barrier()
        except PushError:
            self.abort()
            raise
        except RuntimeError as error:
            self.abort()
            raise PushError(
                f"broadcast of {tensor.nbytes} bytes over CUDA IPC on {self.device} failed: {error}"
            ) from error

    def abort(self) -> None:
        self._chain.abort()

    def close(self) -> None:
        self._chain.close()
        self._thread.shutdown(cancel_futures=True)
        for _, handle in self._lent.values():
            self._memory.take_back(handle)
        self._lent.clear()
        self._opened.clear()
        self._memory.collect()

    def _lend(self, tensor: torch.Tensor) -> TensorHandle:
        """Return a handle of the tensor, and lend each storage only once.

        Every loan takes a reference counter and an event in the driver.
        """
        storage = tensor.untyped_storage()
        if storage._cdata not in self._lent:
            self._memory.collect()
            self._lent = {key: loan for key, loan in self._lent.items() if not loan[0].expired()}
            self._lent[storage._cdata] = (StorageWeakRef(storage), self._memory.lend(tensor))
        _, handle = self._lent[storage._cdata]
        return msgspec.structs.replace(handle, offset_bytes=int(tensor.storage_offset()), num_bytes=tensor.nbytes)

    def _copy(self, handle: TensorHandle, tensor: torch.Tensor) -> None:
        if handle.num_bytes != tensor.nbytes:
            raise PushError(f"rank 0 broadcasts {handle.num_bytes} bytes, rank {self._rank} expects {tensor.nbytes}")
        key = (handle.allocation, handle.storage_offset_bytes, handle.storage_bytes)
        storage = self._opened.pop(key, None)
        if storage is None:
            storage = self._memory.open(handle)
        self._opened[key] = storage
        while len(self._opened) > MAX_OPEN_STORAGES:
            del self._opened[next(iter(self._opened))]
        tensor.copy_(storage[handle.offset_bytes : handle.offset_bytes + handle.num_bytes])
        self._memory.synchronize()
