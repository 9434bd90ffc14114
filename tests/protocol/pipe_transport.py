"""A transport for test_registry.py: a new transport needs only such a file and a line in the registry.

Each worker connects to a socket of the learner, whose port it reads from the entries of the session.
"""

import socket
from collections.abc import Callable, Sequence

import torch

from protocol.errors import PushError
from protocol.transports.collective import Collective, RankContext
from protocol.transports.rendezvous import RendezvousStore
from protocol.transports.worker_connections import TcpConnection

SECRET = b"open sesame"


class PipeCollective(Collective):
    secret_bytes = len(SECRET)

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        secret = context.rendezvous.secret or b""
        if context.rank > 0:
            address = (context.rendezvous.host, int(context.store.get("pipe")))
            self._peers = [TcpConnection(socket.create_connection(address, self._timeout_s), self._timeout_s)]
            self._peers[0].send(memoryview(secret))
            return
        with socket.create_server((context.rendezvous_store.own_host, 0)) as listener:
            listener.settimeout(self._timeout_s)
            context.store.set("pipe", str(listener.getsockname()[1]).encode())
            workers = range(1, context.rendezvous.world_size)
            self._peers = [TcpConnection(listener.accept()[0], self._timeout_s) for _ in workers]
        for peer in self._peers:
            presented = bytearray(len(secret))
            peer.receive(memoryview(presented))
            if presented != secret:
                raise PushError("a worker presented another secret")

    @classmethod
    def obstacle(cls, devices: Sequence[str], is_explicit: bool) -> str | None:
        return "it connects at most two workers" if len(devices) > 3 else None

    @classmethod
    def new_secret(cls, store: RendezvousStore, world_size: int, timeout_s: float) -> bytes:
        return SECRET

    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        memory = memoryview(tensor.numpy())
        try:
            for peer in self._peers:
                peer.send(memory) if self._rank == 0 else peer.receive(memory)
        except OSError as error:
            raise self.failure(f"broadcast of {tensor.nbytes} bytes in", error) from error
        return lambda: None

    def abort(self) -> None:
        for peer in self._peers:
            peer.shut()

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
