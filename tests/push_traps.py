"""Traps in the processes of a push: a signal at the moment when a process reaches a point for the n-th time.

Tests need no sleeps. Points: pausing, joining, labelling (server); forming, broadcast (both).
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
"""Longer than the deadline of one attempt, but shorter than two."""


class Trap(msgspec.Struct, frozen=True):
    """The signal that a process receives when the process with the trap reaches a point for the n-th time."""

    point: str
    pid: int
    signal: int
    """HANG: only the code at the point waits, for `hang_s`."""
    nth: int = 1
    hang_s: float = HANG_S


class _Traps:
    def __init__(self) -> None:
        self._trap: Trap | None = None
        self._num_reached = 0

    def set(self, trap: Trap) -> None:
        self._trap, self._num_reached = trap, 0

    def reach(self, point: str) -> float:
        """Return the number of seconds that the caller must wait."""
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
    """Mixin that adds trap points to a real collective."""

    def __init__(self, context: RankContext) -> None:
        time.sleep(TRAPS.reach("forming"))
        super().__init__(context)  # type: ignore[call-arg]

    def start_broadcast(self, tensor: torch.Tensor) -> Callable[[], None]:
        time.sleep(TRAPS.reach("broadcast"))
        return super().start_broadcast(tensor)  # type: ignore[misc,no-any-return]


class TrappedTcp(Trapped, TcpCollective):
    pass
