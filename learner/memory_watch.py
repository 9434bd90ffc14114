"""The memory of processes that run the user's code, with all that they have started: watched from outside, for within a limit would be a
MemoryError, which the code's own `except` turns into something else.

    a pool of environments or agents ─▶ its processes ─▶ (every WATCH_S) the resident memory of each and its descendants ─▶ too large: killed

Invariant: whoever waits for a process that was killed so is told the limit, not a signal.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from learner.descendants import Process, all_processes, descendants_of

WATCH_S = 0.1


class Watched(Protocol):
    """A process that leads a group of its own."""

    @property
    def pid(self) -> int: ...

    def end_as_too_large(self) -> None: ...


class MemoryWatch:
    """Of the processes of one pool, in a thread of its own; without a limit none is needed."""

    def __init__(self, max_memory_mib: int | None, processes: Callable[[], Iterable[Watched]]) -> None:
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


def resident_bytes(pid: int, processes: Mapping[int, Process]) -> int:
    """Of a process and all that it has started."""
    counted = {pid} | descendants_of(pid, processes)
    return sum(processes[one].resident_bytes for one in counted if one in processes)
