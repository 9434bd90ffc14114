"""Memory limit of processes that run user code, including all their descendants.

    pool ─▶ its processes ─▶ (every WATCH_S) memory of each ─▶ above limit: killed

The limit applies from outside. Inside, it would be a MemoryError, which the code's own `except` might hide.
Invariant: the error for a process killed here names the limit, not a signal.
"""

import threading
from collections.abc import Callable, Iterable, Mapping

from learner.sandbox.descendants import ProcessEntry, all_processes, descendants_of
from learner.sandbox.process import SandboxProcess

WATCH_S = 0.1


class MemoryWatch:
    """Memory watch of a pool's processes, in its own thread if there is a limit."""

    def __init__(self, max_memory_mib: int | None, processes: Callable[[], Iterable[SandboxProcess]]) -> None:
        self._processes, self._is_closed = processes, threading.Event()
        if max_memory_mib is not None:
            threading.Thread(target=self._watch, args=(max_memory_mib << 20,), name="memory watch", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def _watch(self, limit: int) -> None:
        while not self._is_closed.wait(WATCH_S):
            seen = all_processes()
            for process in list(self._processes()):
                if resident_bytes(process.pid, seen) > limit:
                    process.end_as_too_large()


def resident_bytes(pid: int, processes: Mapping[int, ProcessEntry]) -> int:
    """Return the resident memory of a process and all its descendants."""
    counted = {pid} | descendants_of(pid, processes)
    return sum(processes[one].resident_bytes for one in counted if one in processes)
