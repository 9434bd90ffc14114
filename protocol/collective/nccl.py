"""The collective over NCCL between GPUs, on one node or several, by cupy's bindings.

The unique id that admits a rank travels in the Rendezvous, inside the control channel. NCCL itself knows no deadline: a
dead peer leaves a kernel that spins for ever, so every broadcast is watched from outside and its communicator aborted.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from protocol.errors import PushError

POLL_S = 0.0005
SHARED_GPU_SINCE = (2, 30, 3)
SHARED_GPU_SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"


def new_unique_id() -> bytes:
    """Return the 128 bytes by which the ranks of one epoch find each other. Raises PushError without NCCL."""
    return _bindings().get_unique_id()


def ranks_may_share_a_gpu() -> bool:
    """Whether NCCL admits two ranks on one GPU: from 2.30.3 on, if NCCL_MULTI_RANK_GPU_ENABLE=1 on both sides."""
    if os.environ.get(SHARED_GPU_SWITCH) != "1":
        return False
    code = _bindings().get_version()
    return (code // 10_000, code // 100 % 100, code % 100) >= SHARED_GPU_SINCE


def _bindings() -> Any:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise PushError(
            f'the transport nccl needs cupy ({error}): pip install "slipstream-rl[nccl]" on both sides, '
            'or set learner.push.transport = "gloo"'
        ) from error
    if not nccl.available:
        raise PushError('cupy is here but finds no libnccl; install nvidia-nccl or set learner.push.transport = "gloo"')
    return nccl


class SideStream:
    """The stream of one GPU on which the broadcasts run, beside the training or the generation."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    @contextlib.contextmanager
    def selected(self) -> Iterator[int]:
        """Make its GPU the current one of this thread, which is the one NCCL uses; give the stream's address."""
        with torch.cuda.device(self._device):
            yield self._stream.cuda_stream

    def follow(self, tensor: torch.Tensor) -> None:
        """What the current stream has queued for the tensor comes first; its memory is kept until this stream is done."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        tensor.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """Return an event whose query() is true once everything so far is done."""
        return self._stream.record_event()


class NcclCollective:
    """An NCCL communicator of its own. Blocks until all ranks have it. Raises PushError if it cannot be formed."""

    def __init__(
        self, unique_id: bytes, epoch: str, rank: int, world_size: int, device: torch.device, timeout_s: float
    ) -> None:
        self.device = device
        self._epoch, self._timeout_s = epoch, timeout_s
        self._nccl = _bindings()
        self._stream = SideStream(device)
        self._lock = threading.Lock()
        """The communicator is used or aborted, never both: aborting frees it."""
        self._communicator: Any = None
        try:
            with self._stream.selected():
                self._communicator = self._nccl.NcclCommunicator(world_size, unique_id, rank)
        except RuntimeError as error:
            raise PushError(
                f"rank {rank} of {world_size} on {device} could not form epoch {epoch} over nccl: {error}"
            ) from error
        # The first broadcast connects the GPUs and blocks in C meanwhile; the later ones only queue a kernel.
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))

    def broadcast(self, tensor: torch.Tensor) -> None:
        deadline = time.monotonic() + self._timeout_s
        what = f"broadcast of {tensor.nbytes} bytes over nccl in epoch {self._epoch}"
        try:
            done = self._start(tensor)
            while not done.query():
                self._check()
                if time.monotonic() > deadline:
                    raise PushError(
                        f"{what} did not end within {self._timeout_s:g} s (learner.push.timeout_s): a rank is stopped, "
                        "gone or behind a slow network"
                    )
                time.sleep(POLL_S)
        except RuntimeError as error:
            self.abort()
            raise PushError(f"{what} failed: {error}") from error
        except PushError:
            self.abort()
            raise

    def abort(self) -> None:
        with self._lock:
            communicator, self._communicator = self._communicator, None
            if communicator is not None:
                communicator.abort()

    def close(self) -> None:
        # Not `destroy`, which waits for the peers.
        self.abort()

    def _start(self, tensor: torch.Tensor) -> Any:
        with self._lock, self._stream.selected() as stream:
            self._stream.follow(tensor)
            address = tensor.data_ptr()
            communicator = self._open_communicator()
            communicator.broadcast(address, address, tensor.nbytes, self._nccl.NCCL_UINT8, 0, stream)
            return self._stream.mark()

    def _check(self) -> None:
        with self._lock:
            self._open_communicator().check_async_error()

    def _open_communicator(self) -> Any:
        if self._communicator is None:
            raise PushError(f"the collective of epoch {self._epoch} was aborted or closed")
        return self._communicator
