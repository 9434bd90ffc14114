"""Collective over TCP between the CPUs of the ranks, as a chain: each rank hands on what it receives.

    rank 0 ══▶ rank 1 ══▶ rank 2 ══▶ …         each broadcast: first its length in 8 bytes, then its bytes

The bytes leave the learner once, and a rank hands on the first while it receives the next, so that the time
hardly depends on the number of ranks. Rank 1 connects to the learner's port, and each later rank to a port of
the rank before it. A rank that cannot reach that one connects to the learner instead, which then sends once
more: behind a firewall between the servers, the chain becomes a star.

The sockets read and write the memory of the tensors. One thread per connection runs the broadcasts in the
order of their start.
Invariant: a broadcast is done once its bytes are here and the next rank's kernel has them.
"""

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import torch

from protocol.errors import PushError, PushInterrupted
from protocol.transports.collective import Collective, RankContext
from protocol.transports.rendezvous import RendezvousStore
from protocol.transports.worker_connections import (
    SECRET_BYTES,
    TICK_S,
    ConnectionRequest,
    TcpConnection,
    WorkerPort,
    connect_to,
    connect_to_learner,
)

log = logging.getLogger(__name__)
LENGTH = struct.Struct("<Q")
PIECE_BYTES = 1 << 20
"""Size of the pieces that a rank hands on. Each rank of a chain adds the time of one piece."""
NEIGHBOR_TIMEOUT_S = 2.0
"""Maximum time to connect to the rank before. A firewall may drop the attempt silently."""
REACHED = b"+"


class TcpCollective(Collective):
    """Broadcasts along the chain of one session."""

    secret_bytes = SECRET_BYTES

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._source: TcpConnection | None = None
        self._targets: dict[int, TcpConnection] = {}
        """Connections to the ranks that get their bytes from this one."""
        self._is_aborted = False
        secret, rank, world_size = context.rendezvous.secret or b"", context.rank, context.rendezvous.world_size
        if rank == 0:
            self._targets = self._heads(context, secret)
        elif rank + 1 == world_size:
            self._source = self._connect(context, secret)
        else:
            own_host = context.rendezvous_store.own_host
            with contextlib.closing(WorkerPort(own_host, secret, rank + 1, self._timeout_s)) as port:
                context.store.set(f"address of rank {rank}", f"{own_host} {port.number}".encode())
                self._source = self._connect(context, secret)
                try:
                    if int(context.store.get(f"link of rank {rank + 1}")) == rank:
                        self._targets = port.connections.collect(
                            secret, [rank + 1], context.store.check_not_canceled, self._timeout_s
                        )
                except PushError:
                    self._source.close()
                    raise
        self._threads = {target: ThreadPoolExecutor(1, "push-tcp") for target in self._targets}
        self._receiving = ThreadPoolExecutor(1, "push-tcp")

    @classmethod
    def new_secret(cls, store: RendezvousStore, world_size: int, timeout_s: float) -> bytes:
        return store.worker_connections.expect(range(1, world_size), timeout_s)

    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        arriving = _Arriving(tensor.numpy().data, is_here=self._source is None)
        under_way: list[Future[None]] = []
        try:
            if self._source is not None:
                under_way.append(self._receiving.submit(self._receive, self._source, arriving))
            under_way += [
                self._threads[rank].submit(self._send, target, arriving) for rank, target in self._targets.items()
            ]
        except RuntimeError as error:
            raise PushInterrupted(f"the collective of session {self._session} is closed") from error

        def wait_for_all() -> None:
            # Not futures.wait(), which never returns if close() has canceled one of them.
            try:
                while under_way:
                    under_way[0].result()
                    del under_way[0]
            except CancelledError as error:
                raise PushInterrupted(f"the collective of session {self._session} is closed") from error
            except OSError as error:
                for other in under_way[1:]:  # all connections are shut, but they use the tensor until they fail
                    with contextlib.suppress(CancelledError):
                        other.exception()
                raise self.failure(f"broadcast of {tensor.nbytes} bytes in", error) from error
            finally:
                # A stored failure whose traceback leads back to its future is a cycle. It would keep the tensor
                # until Python collects cycles.
                under_way.clear()

        return wait_for_all

    def barrier(self) -> None:
        """Wait until every later rank has reached this barrier. No broadcast may be in progress."""
        reached = bytearray(len(REACHED))
        try:
            for target in self._targets.values():
                target.receive(memoryview(reached))
            if self._source is not None:
                self._source.send(memoryview(REACHED))
        except OSError as error:
            self.abort()
            raise self.failure("waiting for the other ranks of", error) from error

    def blocked_s(self) -> dict[int, float]:
        return {rank: target.blocked_s() for rank, target in self._targets.items()}

    def abort(self) -> None:
        self._is_aborted = True
        for connection in self._connections():
            connection.shut()

    def close(self) -> None:
        self.abort()
        for thread in (*self._threads.values(), self._receiving):
            thread.shutdown(cancel_futures=True)
        for connection in self._connections():
            connection.close()

    def _connections(self) -> list[TcpConnection]:
        return [*([self._source] if self._source is not None else []), *self._targets.values()]

    def _heads(self, context: RankContext, secret: bytes) -> dict[int, TcpConnection]:
        """Return the learner's connections: to rank 1, and to the ranks that cannot reach the one before them."""
        store = context.rendezvous_store
        assert isinstance(store, RendezvousStore)
        try:
            ranks = range(1, context.rendezvous.world_size)
            self.parents = {rank: int(context.store.get(f"link of rank {rank}")) for rank in ranks}
        except PushError:
            store.worker_connections.forget(secret)
            raise
        heads = [rank for rank, parent in self.parents.items() if parent == 0]
        if len(heads) > 1:
            log.warning(
                "sending the weights %d times, because workers cannot reach the one before them in the chain; allow "
                "TCP between the servers, on all ports", len(heads),
            )  # fmt: skip
        return store.worker_connections.collect(secret, heads, context.store.check_not_canceled, self._timeout_s)

    def _connect(self, context: RankContext, secret: bytes) -> TcpConnection:
        """Return the connection to the rank before, or else to the learner."""
        rank, learner = context.rank, (context.rendezvous.host, context.rendezvous.port)
        request = ConnectionRequest(secret, rank)
        connection = None
        if rank > 1:
            host, port = context.store.get(f"address of rank {rank - 1}").decode().split()
            with contextlib.suppress(OSError):
                timeout_s = min(NEIGHBOR_TIMEOUT_S, self._timeout_s)
                connection = connect_to(host, int(port), request, timeout_s, self._timeout_s)
        parent = 0 if connection is None else rank - 1
        connection = connection or connect_to_learner(*learner, request, self._timeout_s)
        context.store.set(f"link of rank {rank}", str(parent).encode())
        return connection

    def _receive(self, source: TcpConnection, arriving: "_Arriving") -> None:
        length = bytearray(LENGTH.size)
        try:
            source.receive(memoryview(length))
            (num_bytes,) = LENGTH.unpack(length)
            if num_bytes != arriving.memory.nbytes:
                raise ConnectionAbortedError(
                    f"rank 0 broadcasts {num_bytes} bytes, rank {self._rank} expects {arriving.memory.nbytes}"
                )
            for start in range(0, num_bytes, PIECE_BYTES):
                source.receive(arriving.memory[start : start + PIECE_BYTES])
                arriving.add(min(PIECE_BYTES, num_bytes - start))
        except OSError:
            self.abort()
            raise

    def _send(self, target: TcpConnection, arriving: "_Arriving") -> None:
        num_bytes, sent = arriving.memory.nbytes, 0
        try:
            target.send(memoryview(LENGTH.pack(num_bytes)))
            while sent < num_bytes:
                here = self._wait_for_more(arriving, sent)
                target.send(arriving.memory[sent:here])
                sent = here
        except OSError:
            self.abort()
            raise

    def _wait_for_more(self, arriving: "_Arriving", sent: int) -> int:
        """Return the number of bytes that are here, once they are more than those sent."""
        deadline = time.monotonic() + self._timeout_s
        while (here := arriving.num_bytes_beyond(sent)) == sent:
            if self._is_aborted:
                raise ConnectionAbortedError("the rank before it sends no more")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{arriving.memory.nbytes - sent} bytes to hand on did not arrive in time")
        return here


class _Arriving:
    """Memory of one broadcast, which fills from its start."""

    def __init__(self, memory: memoryview, *, is_here: bool) -> None:
        self.memory = memory
        self._num_bytes = memory.nbytes if is_here else 0
        self._changed = threading.Condition()

    def add(self, num_bytes: int) -> None:
        with self._changed:
            self._num_bytes += num_bytes
            self._changed.notify_all()

    def num_bytes_beyond(self, known: int) -> int:
        """Return how many bytes are here, after up to a tick if they are not more than those known."""
        with self._changed:
            if self._num_bytes == known:
                self._changed.wait(TICK_S)
            return self._num_bytes
