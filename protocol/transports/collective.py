"""Base class of the transports, which registry.py names.

why_not_here, obstacle ─▶ new_secret ─▶ Rendezvous ─▶ all ranks meet ─▶ Collective(context) ─▶ broadcast* ─▶ close
"""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import msgspec
import torch

from protocol.errors import PushError, PushInterrupted
from protocol.messages import Rendezvous
from protocol.transports.registry import TRANSPORTS
from protocol.transports.rendezvous import RendezvousStore, SessionStore, StoreOrClient


class RankContext(msgspec.Struct, frozen=True):
    """Rank of a session in which all ranks have met."""

    session: str
    rank: int
    rendezvous: Rendezvous
    device: torch.device
    """Device on which the rank computes."""
    rendezvous_store: StoreOrClient
    """Store of all sessions. It knows this rank's address, and opens connections to the learner's port."""
    store: SessionStore
    """Entries of the session, which all ranks share."""


class Collective(ABC):
    """Transport of the weights. An instance connects one rank to the others of its session.

    The constructor blocks until all ranks are connected.

    Raises:
        PushError: They cannot connect.
    """

    between_gpus: ClassVar[bool] = False
    """Whether tensors stay on the GPUs. Otherwise, they travel through the CPUs."""
    sends_in_place: ClassVar[bool] = True
    """Whether a tensor is best sent from its own memory, instead of from a few rotating buffers."""
    secret_bytes: ClassVar[int] = 0
    """Size of the secret of a session."""
    may_hang: ClassVar[bool] = False
    """Whether the constructor may hang forever in C."""
    finding: ClassVar[str] = ""
    """Report of the server's doctor where the transport works. Empty: the doctor does not check it."""
    device: torch.device
    """Device of the tensors."""
    parents: Mapping[int, int] = {}
    """Rank from which each worker gets its bytes, at rank 0 of a chain."""

    def __init__(self, context: RankContext) -> None:
        self.device = context.device if self.between_gpus else torch.device("cpu")
        self._session, self._rank, self._timeout_s = context.session, context.rank, context.rendezvous.timeout_s

    @classmethod
    def needs(cls) -> str:
        """Return what both sides need, for errors."""
        return "slipstream-rl on both sides"

    @classmethod
    def why_not_here(cls) -> str | None:
        """Return why this machine cannot use it, with the remedy, or None if it can.

        A transport between GPUs need not look for a GPU.
        """
        return None

    @classmethod
    def version(cls) -> str:
        """Return the version of its library, if it connects only equal ones. Empty: it has none.

        Call it only where `why_not_here` returns None.
        """
        return ""

    @classmethod
    def obstacle(cls, devices: Sequence[str], is_explicit: bool) -> str | None:
        """Return why it cannot connect these devices, or None if it can. `is_explicit` is false for "auto"."""
        return None

    @classmethod
    def new_secret(cls, store: RendezvousStore, world_size: int, timeout_s: float) -> bytes | None:
        """Return the secret of a new session. Raises PushError if the transport is not installed."""
        return None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Start a broadcast and wait until it is done."""
        self.start_broadcast(tensor)()

    @abstractmethod
    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start to copy rank 0's flat uint8 tensor into every other rank's.

        Return a function that blocks until the copy is done. Several broadcasts may be in progress. Every
        rank starts them, and waits for them, in the same order.

        On a GPU, a broadcast follows all work that the calling thread's stream has queued. That work may
        fill, read or free the memory. Until the wait is over, the memory may not be touched.

        Raises:
            PushError: At the deadline, if a peer is gone, or after `abort`. The returned function raises it
                too.
        """

    @abstractmethod
    def abort(self) -> None:
        """Abort the collective, from any thread.

        A broadcast that another thread waits for raises PushError at once, as does every later one.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group and free its resources.

        A peer that waits in a broadcast gets an error.
        """

    def blocked_s(self) -> dict[int, float]:
        """Return how long each rank that gets its bytes from this one has taken none. Thread-safe."""
        return {}

    def failure(self, what: str, reason: Exception) -> PushError:
        """Return the error for a failed operation, such as `broadcast of 48 bytes in`."""
        return PushInterrupted(
            f"{what} session {self._session} failed: {reason} "
            f"(deadline {self._timeout_s:g} s, learner.weight_sync.timeout_s)"
        )


def load_transport(name: str) -> type[Collective]:
    """Return the class of a transport. Raises PushError if the registry has none of this name."""
    if name not in TRANSPORTS:
        raise PushError(
            f"unknown transport {name[:40]!r}; expected one of {', '.join(TRANSPORTS)}. Install the same slipstream-rl "
            "on both sides"
        )
    transport: type[Collective] = pkgutil.resolve_name(TRANSPORTS[name].path)
    return transport
