"""The collective over one port of the learner: rank 0 sends each worker the same bytes, on the line that the worker has opened.

    rank 0 ══ line 1 ══▶ rank 1          of each broadcast first its length, in 8 bytes, then its bytes
           ══ line 2 ══▶ rank 2

Bytes go from and into the memory of the tensors. One thread a line does one broadcast after the other, in the order in which
they were begun. Invariant: a line that has failed once carries nothing more, for nobody knows where in the stream it stands.
"""

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait

import torch

from protocol.collective.lines import Line
from protocol.errors import PushError

LENGTH = struct.Struct("<Q")


class TcpCollective:
    """Broadcasts over the lines of one epoch: rank 0 has one to each worker, a worker the one to rank 0."""

    device = torch.device("cpu")
    sends_in_place = True

    def __init__(self, lines: Sequence[Line], epoch: str, rank: int, timeout_s: float) -> None:
        self._lines, self._epoch, self._rank, self._timeout_s = lines, epoch, rank, timeout_s
        self._threads = [ThreadPoolExecutor(1, "push-line") for _ in lines]

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.start_broadcast(tensor)()

    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        memory = tensor.numpy().data
        move = self._send if self._rank == 0 else self._receive
        try:
            under_way = [
                thread.submit(move, line, memory) for thread, line in zip(self._threads, self._lines, strict=True)
            ]
        except RuntimeError as error:
            raise PushError(f"the collective of epoch {self._epoch} is closed") from error

        def wait_for_all() -> None:
            wait(under_way, return_when=FIRST_EXCEPTION)
            try:
                for transfer in under_way:
                    transfer.result()
            except CancelledError as error:
                raise PushError(f"the collective of epoch {self._epoch} is closed") from error
            except OSError as error:
                wait(under_way)  # they end at once, all lines being shut, and read the tensor until then
                raise PushError(
                    f"broadcast of {tensor.nbytes} bytes in epoch {self._epoch} failed: {error} "
                    f"(deadline {self._timeout_s:g} s, learner.push.timeout_s)"
                ) from error

        return wait_for_all

    def abort(self) -> None:
        for line in self._lines:
            line.shut()

    def close(self) -> None:
        self.abort()
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        for line in self._lines:
            line.close()

    def _send(self, line: Line, memory: memoryview) -> None:
        try:
            line.send(memoryview(LENGTH.pack(memory.nbytes)))
            line.send(memory)
        except OSError:
            self.abort()
            raise

    def _receive(self, line: Line, memory: memoryview) -> None:
        length = bytearray(LENGTH.size)
        try:
            line.receive(memoryview(length))
            (num_bytes,) = LENGTH.unpack(length)
            if num_bytes != memory.nbytes:
                raise ConnectionAbortedError(
                    f"rank 0 broadcasts {num_bytes} bytes, rank {self._rank} expects {memory.nbytes}"
                )
            line.receive(memory)
        except OSError:
            self.abort()
            raise
