"""Traps in the processes of a push: a signal sent the moment a process comes to a point for the n-th time.

So no test has to sleep and hope. Points: pausing, joining, labelling (server); forming, broadcast (both).
"""

import os
import time
from collections.abc import Callable

import msgspec
import torch

from protocol.transports.collective import RankContext
from protocol.transports.tcp import TcpCollective

PUSH_TIMEOUT_S = 1.5
HANG = 0
HANG_S = 1.5 * PUSH_TIMEOUT_S
"""Past the deadline of one attempt, but not of the next."""


class Trap(msgspec.Struct, frozen=True):
    """What happens to whom when the process in which it is set reaches a point for the n-th time."""

    point: str
    pid: int
    signal: int
    """HANG: only what has come to the point stands still, and that for `hang_s`."""
    nth: int = 1
    hang_s: float = HANG_S


class _Traps:
    def __init__(self) -> None:
        self._trap: Trap | None = None
        self._num_reached = 0

    def set(self, trap: Trap) -> None:
        self._trap, self._num_reached = trap, 0

    def reach(self, point: str) -> float:
        """Return how many seconds the caller is to stand still."""
        trap = self._trap
        if trap is None or trap.point != point:
            return 0.0
        self._num_reached += 1
        if self._num_reached < trap.nth:
            return 0.0
        self._trap = None
        os.kill(trap.pid, trap.signal)
        return trap.hang_s if trap.signal == HANG else 0.0


TRAPS = _Traps()


class Trapped:
    """Before a real collective, with the points at which a push is caught in the middle."""

    def __init__(self, context: RankContext) -> None:
        time.sleep(TRAPS.reach("forming"))
        super().__init__(context)  # type: ignore[call-arg]

    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        time.sleep(TRAPS.reach("broadcast"))
        return super().start_broadcast(tensor)  # type: ignore[misc,no-any-return]


class TrappedTcp(Trapped, TcpCollective):
    pass
