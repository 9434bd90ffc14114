"""Collective over one port of the learner. All workers receive the same bytes.

    rank 0 ══ connection 1 ══▶ rank 1          each broadcast: first its length in 8 bytes, then its bytes
           ══ connection 2 ══▶ rank 2

The sockets read and write the memory of the tensors. One thread per connection runs the broadcasts in the
order of their start.
"""

import struct
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait

import torch

from protocol.errors import PushError
from protocol.transports.collective import Collective, RankContext
from protocol.transports.rendezvous import RendezvousStore
from protocol.transports.worker_connections import SECRET_BYTES, ConnectionRequest, TcpConnection

LENGTH = struct.Struct("<Q")


class TcpCollective(Collective):
    """Broadcasts over the connections of one session.

    Rank 0 has a connection to each worker, and a worker has one to rank 0.
    """

    secret_bytes = SECRET_BYTES

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        request = ConnectionRequest(context.rendezvous.secret or b"", context.rank)
        self._peers = context.rendezvous_store.open_connections(
            request, context.store.check_not_canceled, self._timeout_s
        )
        self._threads = [ThreadPoolExecutor(1, "push-tcp") for _ in self._peers]

    @classmethod
    def new_secret(cls, store: RendezvousStore, world_size: int, timeout_s: float) -> bytes:
        return store.worker_connections.expect(world_size, timeout_s)

    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        memory = tensor.numpy().data
        try:
            under_way = [
                thread.submit(self._transfer, peer, memory)
                for thread, peer in zip(self._threads, self._peers, strict=True)
            ]
        except RuntimeError as error:
            raise PushError(f"the collective of session {self._session} is closed") from error

        def wait_for_all() -> None:
            wait(under_way, return_when=FIRST_EXCEPTION)
            try:
                for transfer in under_way:
                    transfer.result()
            except CancelledError as error:
                raise PushError(f"the collective of session {self._session} is closed") from error
            except OSError as error:
                wait(under_way)  # all connections are shut, but the others read the tensor until they fail
                raise self.failure(f"broadcast of {tensor.nbytes} bytes in", error) from error

        return wait_for_all

    def abort(self) -> None:
        for peer in self._peers:
            peer.shut()

    def close(self) -> None:
        self.abort()
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        for peer in self._peers:
            peer.close()

    def _transfer(self, peer: TcpConnection, memory: memoryview) -> None:
        length = bytearray(LENGTH.pack(memory.nbytes))
        try:
            if self._rank == 0:
                peer.send(memoryview(length))
                peer.send(memory)
                return
            peer.receive(memoryview(length))
            (num_bytes,) = LENGTH.unpack(length)
            if num_bytes != memory.nbytes:
                raise ConnectionAbortedError(
                    f"rank 0 broadcasts {num_bytes} bytes, rank {self._rank} expects {memory.nbytes}"
                )
            peer.receive(memory)
        except OSError:
            self.abort()
            raise
