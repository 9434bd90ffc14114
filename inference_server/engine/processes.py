"""Processes of one engine's workers, which the server watches and kills.

When one of several workers is killed, vLLM itself reports it only after 9 s, because it waits for the others.
"""

import contextlib
import os
import select
import signal
from collections.abc import Iterable

from inference_server.engine.interface import EngineDead

END_TIMEOUT_S = 10.0
"""Maximum seconds for a killed process to release its memory, including GPU memory."""


class EngineProcesses:
    """Worker processes, held by pidfd, because a pid may be reused."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors = {os.pidfd_open(pid) for pid in set(pids)}

    @property
    def one_has_ended(self) -> bool:
        return any(_has_ended(descriptor, 0) for descriptor in self._descriptors)

    def kill(self) -> None:
        """Kill the remaining processes. Raises EngineDead if one outlives END_TIMEOUT_S."""
        for descriptor in self._descriptors:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        while self._descriptors:
            descriptor = self._descriptors.pop()
            ended = _has_ended(descriptor, END_TIMEOUT_S)
            os.close(descriptor)
            if not ended:
                raise EngineDead(f"a worker of the dead engine is still running {END_TIMEOUT_S:g} s after SIGKILL")


def _has_ended(descriptor: int, timeout_s: float) -> bool:
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    return bool(watch.poll(timeout_s * 1000))
