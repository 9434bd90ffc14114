"""Handling of Ctrl-C, SIGTERM and a closed terminal.

After the first signal, the learner finishes the step and writes a checkpoint. A second one stops it at once.
"""

import logging
import signal
from types import FrameType, TracebackType
from typing import Any

from protocol.signals import forces_exit, shutdown_signals

log = logging.getLogger(__name__)


class Interrupt:
    """Signal handler with two stages.

    The first signal sets `requested`. A second one, except SIGHUP, raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in shutdown_signals():
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if forces_exit(number):
                raise KeyboardInterrupt
            return
        self.requested = True
        log.warning("stopping after this step, with a checkpoint (interrupt again to stop now)")
