"""Both ends of a watched transfer that never ends: `python -m tests.watching store HOST` and `… worker HOST PORT`."""

import sys
import threading
from collections.abc import Callable

import torch

from protocol.errors import PushError
from protocol.messages import Rendezvous
from protocol.transports.group import RendezvousHost, watched

TIMEOUT_S = 60.0


class WaitingCollective:
    """A collective whose broadcasts end only when they are aborted."""

    device = torch.device("cpu")
    sends_in_place = True

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.start_broadcast(tensor)()

    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        return self._wait

    def _wait(self) -> None:
        assert self.aborted.wait(TIMEOUT_S), f"not aborted within {TIMEOUT_S} s"
        raise PushError("the broadcast was aborted")

    def blocked_s(self) -> dict[int, float]:
        return {}

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.abort()


def transfer(rendezvous: Rendezvous, session: str = "e1") -> None:
    collective = WaitingCollective()
    with watched(collective, rendezvous, session, 1):
        collective.broadcast(torch.empty(1))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["store", host]:
            print(RendezvousHost(host, TIMEOUT_S).rendezvous(1, "tcp").port, flush=True)
            threading.Event().wait()
        case ["worker", host, port]:
            print("watching", flush=True)
            try:
                transfer(Rendezvous(transport="tcp", host=host, port=int(port), world_size=2, timeout_s=TIMEOUT_S))
            except PushError as error:
                print(error, flush=True)
