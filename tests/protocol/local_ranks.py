"""Sessions whose ranks are all in this process, and calls in other threads that are expected to wait."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest
import torch

from protocol.errors import PushError
from protocol.messages import Rendezvous
from protocol.transports.collective import Collective
from protocol.transports.group import RendezvousHost, join_collective
from protocol.transports.worker_connections import SECRET_BYTES

HOST = "127.0.0.1"
CPU = torch.device("cpu")
TIMEOUT_S = 60.0
PROMPTLY_S = 30.0
"""Far below the deadline of a minute that the waits would otherwise have, far above what they take."""


def zeros(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


@contextlib.contextmanager
def rendezvous_host() -> Iterator[RendezvousHost]:
    hosted = RendezvousHost(HOST, TIMEOUT_S)
    try:
        yield hosted
    finally:
        hosted.close()


def rendezvous_at(port: int) -> Rendezvous:
    """What a learner would say of a session of two ranks that meet at a port."""
    return Rendezvous(
        transport="tcp", host=HOST, port=port, world_size=2, timeout_s=TIMEOUT_S, secret=bytes(SECRET_BYTES)
    )


def join_all(
    hosted: RendezvousHost, session: str = "s1", num_workers: int = 1, transport: str = "tcp"
) -> list[Collective]:
    """Form a session, and return its ranks."""
    rendezvous = hosted.rendezvous(num_workers, transport)
    with ThreadPoolExecutor(num_workers) as pool:
        workers = [pool.submit(join_collective, session, rendezvous, 1 + index, CPU) for index in range(num_workers)]
        return [hosted.host_collective(session, rendezvous, CPU), *(worker.result() for worker in workers)]


@contextlib.contextmanager
def joined(num_workers: int = 1, transport: str = "tcp") -> Iterator[list[Collective]]:
    """The ranks of a session, which is over at the end of the block."""
    with rendezvous_host() as hosted:
        ranks = join_all(hosted, "s1", num_workers, transport)
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.close()


def broadcast(ranks: Sequence[Collective], sent: torch.Tensor) -> None:
    """Broadcast, and check that every rank gets the bytes of rank 0."""
    received = [zeros(sent.numel()) for _ in ranks[1:]]
    with ThreadPoolExecutor(len(received)) as pool:
        workers = [pool.submit(rank.broadcast, buffer) for rank, buffer in zip(ranks[1:], received, strict=True)]
        ranks[0].broadcast(sent)
        for worker in workers:
            worker.result()
    assert all(torch.equal(buffer, sent) for buffer in received)


def race_clock(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Let a minute of a module's clock pass in 60 ms. The deadlines that it had set before are over at once.

    A short timeout instead would also be over, on a busy machine, before what the test waits for has happened.
    """
    clock = SimpleNamespace(monotonic=lambda: 1000 * time.monotonic(), sleep=time.sleep)
    monkeypatch.setattr(module, "time", clock)


class Waiting:
    """A call in another thread that is expected to fail."""

    def __init__(self, call: Callable[[], object], name: str | None = None) -> None:
        self._call, self.error = call, ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except PushError as error:
            self.error = str(error)

    def is_waiting(self) -> bool:
        return self._thread.is_alive()

    def ends_promptly(self, timeout_s: float = PROMPTLY_S) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
