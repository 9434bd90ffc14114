"""The receiving process of the transport benchmark: receives each ordered transfer and reports its end.

    benchmark ── Order (pipe) ──▶ peer: "ready" ─▶ receives over the collective ─▶ its checksum (pipe)

Both ends of a measurement use the same order, so that both run the same code.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple

import torch

from protocol.messages import Manifest, Rendezvous
from protocol.transports.collective import Collective
from protocol.transports.group import RendezvousHost, join_collective
from protocol.weights import dense as weights
from protocol.weights.buckets import BucketMemory, Checksum, checksum_of
from protocol.weights.delta import Baseline, receive_changes
from protocol.weights.dense import receive_weights

HOST = "127.0.0.1"
SESSION = "bench"
TIMEOUT_S = 120.0

Variant = Literal["raw", "raw into fresh memory", "push", "push without checksums"]


class Order(NamedTuple):
    """One transfer."""

    variant: Variant
    num_bytes: int
    """Size of the tensor of a raw transfer."""
    manifest: Manifest | None = None
    """Manifest of the weights of a push."""


class Kept(NamedTuple):
    """State that a receiver keeps between the pushes of one manifest."""

    manifest: Manifest
    memory: BucketMemory
    baseline: Baseline


class NoChecksum(Checksum):
    """Replaces the checksum on both sides, so that a push consists only of transport and copies."""

    def update(self, bytes_N: torch.Tensor) -> None:
        pass


@contextmanager
def as_ordered(order: Order) -> Iterator[None]:
    """Disable the parts that the variant excludes."""
    weights.Checksum = NoChecksum if order.variant == "push without checksums" else Checksum  # type: ignore[misc]
    try:
        yield
    finally:
        weights.Checksum = Checksum  # type: ignore[misc]


class Peer:
    """The receiving process and the collective with it."""

    def __init__(self, transport: str, device: torch.device, peer_device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._rendezvous_host = RendezvousHost(HOST, TIMEOUT_S)
        rendezvous = self._rendezvous_host.rendezvous(1, transport)
        self._process = context.Process(target=serve, args=(theirs, rendezvous, str(peer_device)), daemon=True)
        self._process.start()
        theirs.close()
        self.collective: Collective = self._rendezvous_host.host_collective(SESSION, rendezvous, device)

    def order(self, order: Order) -> None:
        """Send an order and wait until the peer is ready."""
        self._pipe.send(order)
        self.answer()

    def answer(self) -> str:
        """Wait for the peer's next message. Raises TimeoutError, or EOFError if the peer has ended."""
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"the receiving process did not answer within {TIMEOUT_S:g} s")
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(TIMEOUT_S)
        self.collective.close()
        self._rendezvous_host.close()


def serve(pipe: Connection, rendezvous: Rendezvous, device: str) -> None:
    """Run the peer's process."""
    torch.set_num_threads(1)
    collective = join_collective(SESSION, rendezvous, 1, torch.device(device))
    raw = torch.empty(0, dtype=torch.uint8, device=device)
    kept: dict[str, Kept] = {}
    order: Order | None
    while (order := pipe.recv()) is not None:
        if order.manifest is None:
            if len(raw) != order.num_bytes:
                raw = torch.zeros(order.num_bytes, dtype=torch.uint8, device=device)
        elif order.manifest.wire not in kept or kept[order.manifest.wire].manifest != order.manifest:
            memory = BucketMemory(order.manifest, collective.device)
            kept[order.manifest.wire] = Kept(order.manifest, memory, Baseline())
        pipe.send("ready")
        with as_ordered(order):
            pipe.send(receive(collective, order, raw, kept))
    collective.close()


def receive(collective: Collective, order: Order, raw: torch.Tensor, kept: dict[str, Kept]) -> str:
    """Receive one transfer. Return its checksum, which is empty for a raw transfer."""
    if order.manifest is None:
        collective.broadcast(torch.empty_like(raw) if order.variant == "raw into fresh memory" else raw)
        return ""
    if order.manifest.wire == "delta":
        arriving = receive_changes(collective, order.manifest, kept["delta"].baseline)
    else:
        arriving = receive_weights(collective, order.manifest, kept["dense"].memory)
    return checksum_of([arrived.checksum for arrived in arriving])
