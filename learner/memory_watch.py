"""The memory of processes that run the user's code, with all that they have started: watched from outside, for within a limit would be a
MemoryError, which the code's own `except` turns into something else. Imports nothing of the learner.

    a pool of environments or agents ─▶ its processes ─▶ (every WATCH_S) the resident memory of each one's group ─▶ too large: killed

Invariant: whoever waits for a process that was killed so is told the limit, not a signal.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
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
            resident = resident_by_group()
            for process in list(self._processes()):
                if resident[process.pid] > limit:
                    process.end_as_too_large()


def resident_by_group() -> Counter[int]:
    """Bytes, by the number of the process that leads the group."""
    resident: Counter[int] = Counter()
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            # Behind the name, which may hold anything: state, parent, group, …; the 22nd is the number of resident pages.
            fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
            resident[int(fields[2])] += int(fields[21]) * PAGE_BYTES
    return resident
