"""Harm to the bytes of a push."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from protocol.transports.collective import Collective

TIMEOUT_S = 60.0
BREAK_FILE = "SLIPSTREAM_TEST_BREAK_FILE"
"""For breakable_server.py, in the environment: the path of a file with the index of the broadcast that goes wrong."""
LOST_VERSION = "SLIPSTREAM_TEST_LOST_VERSION"
"""For tests/bench/losing_server.py, in the environment: the version whose sync is lost."""


class OneBitFlipped:
    """A sender's collective in which one bit of one broadcast changes on its way."""

    def __init__(self, collective: Collective, broadcast_index: int) -> None:
        self._collective, self._left = collective, broadcast_index
        self.device, self.sends_in_place = collective.device, collective.sends_in_place

    def broadcast(self, tensor: Any) -> None:
        self.start_broadcast(tensor)()

    def start_broadcast(self, tensor: Any) -> Callable[[], None]:
        if self._is_next():
            tensor = tensor.clone()
            _flip(tensor)
        return self._collective.start_broadcast(tensor)

    def _is_next(self) -> bool:
        self._left -= 1
        return self._left == -1

    def abort(self) -> None:
        self._collective.abort()

    def close(self) -> None:
        self._collective.close()


class OneBitFlippedOnArrival(OneBitFlipped):
    """The same for a receiver."""

    def start_broadcast(self, tensor: Any) -> Callable[[], None]:
        wait, is_next = self._collective.start_broadcast(tensor), self._is_next()

        def wait_and_flip() -> None:
            wait()
            if is_next:
                _flip(tensor)

        return wait_and_flip


def _flip(tensor: Any) -> None:
    tensor[len(tensor) // 2] ^= 4


class Halting:
    """Tensors of which the second half comes only once `go_on` is set; `is_halfway` says that the first half has gone."""

    def __init__(self, tensors: list[tuple[str, Any]]) -> None:
        self._tensors = tensors
        self.is_halfway, self.go_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        middle = len(self._tensors) // 2
        yield from self._tensors[:middle]
        self.is_halfway.set()
        assert self.go_on.wait(TIMEOUT_S)
        yield from self._tensors[middle:]
