"""Pool of processes that run user code: start, lease, replace, close, and the memory limit of each.

    acquire ─▶ a free process, or a new one ─▶ release ─▶ free again, or killed if ended or unanswered
    (every WATCH_S) memory of each process with all its descendants ─▶ above the limit twice in a row: killed

The limit applies from outside. Inside, it would be a MemoryError, which the code's own `except` might hide.
Invariants: a process serves one caller at a time, and one that has ended costs only its own caller. No process
outlives `close`. The error for a process killed here names the limit, not a signal.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from learner.sandbox.descendants import ProcessEntry, all_processes, children_by_parent, descendants_of
from learner.sandbox.process import SandboxLimits, SandboxProcess
from learner.sandbox.start import EXHAUSTED
from learner.sandbox.user_files import UserFiles
from protocol.errors import ProcessesExhausted, SlipstreamError

WATCH_S = 0.1
P = TypeVar("P", bound=SandboxProcess)


class PoolClosed(SlipstreamError):
    """The pool starts no more processes, because the run is ending."""


class ProcessPool(Generic[P]):
    """Processes of one kind, used from any thread."""

    def __init__(self, start: Callable[[], P], limits: SandboxLimits, max_leases: int = 1) -> None:
        """Watch the memory of the processes. `max_leases`: maximum number of concurrent leases."""
        self._start, self._limits = start, limits
        self._lock, self.is_closed = threading.Lock(), False
        self._free: list[P] = []
        self._all: set[P] = set()
        self._user_files = UserFiles()
        self._leases = asyncio.Semaphore(max_leases)
        self._watch = MemoryWatch(limits.max_memory_mib, lambda: self._all)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[P]:
        """Lease a process in the event loop, in order of arrival. Canceled once the pool is closed."""
        async with self._leases:
            try:
                process = self.acquire()
            except PoolClosed as error:
                raise asyncio.CancelledError from error
            try:
                yield process
            finally:
                self.release(process)

    def acquire(self) -> P:
        """Return a free process, or a new one. Drop those that were killed while free.

        Raises:
            PoolClosed: The pool is closed.
            ProcessesExhausted: The machine has no room for a new one.
        """
        while True:
            with self._lock:
                process = self._free.pop() if self._free else None
            if process is None:
                return self.start()
            if process.is_usable:
                return process
            self.drop(process)

    def start(self) -> P:
        """Start another process.

        Raises:
            PoolClosed: The pool is closed.
            ProcessesExhausted: The machine has no room for it.
        """
        if self.is_closed:
            raise PoolClosed("the pool of processes is closed")
        try:
            process = self._start()
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            section = self._limits.section
            raise ProcessesExhausted(
                f"the machine cannot start another process of {section} ({error.strerror}); lower "
                f"{section}.{self._limits.processes_key}, or raise its limits (ulimit -u, ulimit -n, container pids)"
            ) from error
        process.user_files = self._user_files
        with self._lock:
            self._all.add(process)
        if self.is_closed:  # meanwhile
            self.drop(process)
            raise PoolClosed("the pool of processes is closed")
        return process

    def release(self, process: P) -> None:
        """Make a process free again, or drop it if it is no longer usable."""
        if process.is_usable:
            with self._lock:
                self._free.append(process)
        else:
            self.drop(process)

    def drop(self, process: P) -> None:
        """Kill a process that is not needed any more."""
        process.close()
        with self._lock:
            self._all.discard(process)

    def close(self) -> None:
        """Kill all processes, even in the middle of a call. Pending calls return."""
        with self._lock:
            self.is_closed = True
            processes = list(self._all)
        self._watch.close()
        SandboxProcess.kill_all(processes)
        for process in processes:
            process.close()


class MemoryWatch:
    """Memory watch of a pool's processes, in its own thread if there is a limit."""

    def __init__(self, max_memory_mib: int | None, processes: Callable[[], Iterable[SandboxProcess]]) -> None:
        self._processes, self._is_closed = processes, threading.Event()
        if max_memory_mib is not None:
            threading.Thread(target=self._watch, args=(max_memory_mib << 20,), name="memory watch", daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()

    def _watch(self, limit: int) -> None:
        were_large: set[SandboxProcess] = set()
        while not self._is_closed.wait(WATCH_S):
            processes = list(self._processes())
            used = resident_bytes([process.pid for process in processes], all_processes())
            large = {process for process in processes if used[process.pid] > limit}
            # Between fork and exec, a new process and the child of any process seem to have all memory of their parent.
            for process in large & were_large:
                process.end_as_too_large()
            were_large = large


def resident_bytes(pids: Iterable[int], processes: Mapping[int, ProcessEntry]) -> dict[int, int]:
    """Return, by PID, the resident memory of a process and all its descendants."""
    children = children_by_parent(processes)  # once, because the machine may have thousands
    families = {pid: {pid} | descendants_of(pid, children) for pid in pids}
    return {
        pid: sum(processes[one].resident_bytes for one in family if one in processes)
        for pid, family in families.items()
    }
