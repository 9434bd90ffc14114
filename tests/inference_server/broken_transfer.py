"""Corrupt or pause the bytes of a push."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from protocol.transports.collective import Collective

TIMEOUT_S = 60.0
BREAK_FILE = "SLIPSTREAM_TEST_BREAK_FILE"
"""Environment variable for breakable_server.py: path of a file with the index of the broadcast to corrupt."""
LOST_VERSION = "SLIPSTREAM_TEST_LOST_VERSION"
"""Environment variable for tests/bench/losing_server.py: the version whose sync is lost."""


class BitFlippingSender:
    """A sender's collective that flips one bit of one broadcast."""

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


class BitFlippingReceiver(BitFlippingSender):
    """A receiver's collective that flips one bit of one broadcast."""

    def start_broadcast(self, tensor: Any) -> Callable[[], None]:
        wait, is_next = self._collective.start_broadcast(tensor), self._is_next()

        def wait_and_flip() -> None:
            wait()
            if is_next:
                _flip(tensor)

        return wait_and_flip


def _flip(tensor: Any) -> None:
    tensor[len(tensor) // 2] ^= 4


class PausingTensors:
    """Tensors that pause halfway until `go_on` is set. `is_halfway` is set after the first half."""

    def __init__(self, tensors: list[tuple[str, Any]]) -> None:
        self._tensors = tensors
        self.is_halfway, self.go_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        middle = len(self._tensors) // 2
        yield from self._tensors[:middle]
        self.is_halfway.set()
        assert self.go_on.wait(TIMEOUT_S)
        yield from self._tensors[middle:]
