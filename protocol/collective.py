"""The collective that carries the bytes of a push: the learner is rank 0, the server's workers are ranks 1..N.

One collective lives for one epoch. Every call has the epoch's deadline; after any error the collective is closed and a
new epoch makes a new one. Torch is imported here and in weights.py, never by `import protocol`.
"""

import socket
from datetime import timedelta
from typing import Protocol
from urllib.parse import urlsplit

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from protocol.errors import PushFailed
from protocol.messages import Rendezvous


class Collective(Protocol):
    """What a push needs from a transport."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's CPU tensor into every other rank's. Raises PushFailed at the deadline or when a peer is gone."""
        ...

    def close(self) -> None:
        """Leave the group; a peer that waits in a broadcast gets an error."""
        ...


def address_towards(endpoint: str) -> str:
    """Return the local address from which `tcp://host:port` is reached: the one the server's workers can call back."""
    url = urlsplit(endpoint)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((url.hostname or "127.0.0.1", url.port or 9))
        return probe.getsockname()[0]


class Meeting:
    """The learner's listening store, in which all ranks of an epoch find each other.

    It listens on the one address the server reaches the learner by, on a free port, for the life of the learner.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host, self._timeout_s = host, timeout_s
        listener = socket.create_server((host, 0))
        self._port = listener.getsockname()[1]
        # The store takes over the bound socket: without this it would listen on every interface.
        self._store = TCPStore(
            host, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=timeout_s), use_libuv=True,
        )  # fmt: skip

    def rendezvous(self, num_workers: int) -> Rendezvous:
        return Rendezvous(
            transport="gloo", host=self._host, port=self._port, world_size=1 + num_workers, timeout_s=self._timeout_s
        )

    def host_collective(self, epoch: str, rendezvous: Rendezvous) -> Collective:
        """Join as rank 0; blocks until every worker has joined. Raises PushFailed at the deadline."""
        return _GlooCollective(self._store, epoch, rank=0, rendezvous=rendezvous, own_host=self._host)


def join_collective(epoch: str, rendezvous: Rendezvous, rank: int) -> Collective:
    """Join the learner's epoch from a worker of the server. Raises PushFailed at the deadline."""
    try:
        store = TCPStore(
            rendezvous.host, rendezvous.port, is_master=False, timeout=timedelta(seconds=rendezvous.timeout_s)
        )
    except (RuntimeError, ValueError) as error:
        raise PushFailed(
            f"cannot reach the learner's rendezvous {rendezvous.host}:{rendezvous.port}: {error}"
        ) from error
    own_host = address_towards(f"tcp://{rendezvous.host}:{rendezvous.port}")
    return _GlooCollective(store, epoch, rank=rank, rendezvous=rendezvous, own_host=own_host)


class _GlooCollective:
    """A gloo process group beside the process's own default group, over TCP, on CPU tensors."""

    def __init__(self, store: TCPStore, epoch: str, *, rank: int, rendezvous: Rendezvous, own_host: str) -> None:
        self._epoch, self._timeout_s = epoch, rendezvous.timeout_s
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Without a named device gloo listens on whatever the host name resolves to.
        options._devices = [ProcessGroupGloo.create_device(hostname=own_host)]
        options._timeout = timedelta(seconds=rendezvous.timeout_s)
        try:
            self._group = ProcessGroupGloo(PrefixStore(epoch, store), rank, rendezvous.world_size, options)
        except RuntimeError as error:
            raise PushFailed(
                f"rank {rank} of {rendezvous.world_size} could not form epoch {epoch} within {self._timeout_s} s: {error}"
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            self._group.broadcast([tensor], options).wait()  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise PushFailed(
                f"broadcast of {tensor.nbytes} bytes in epoch {self._epoch} failed: {error} "
                f"(deadline {self._timeout_s} s, learner.push.timeout_s)"
            ) from error

    def close(self) -> None:
        self._group.abort()
        del self._group  # only its destructor closes the sockets, which is what a waiting peer notices
