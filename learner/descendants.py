"""What a process has started, and what that has started, in whatever session: found and killed. Loaded by its path too, in interpreters
that know nothing of Slipstream, so it imports the standard library alone.

    adopt_orphans (in the process)      what a descendant leaves behind becomes the process's own child, not the init process's
    kill_with_descendants (outside)     all of it ends;    end_with_descendants (in the process) the same, of itself

Invariant: what leaves the group and session of a process that has adopted its orphans ends with it, unless it ends by itself. Linux only;
elsewhere its group ends.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from glob import glob
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SET_CHILD_SUBREAPER = 36
"""Of prctl(2)."""
MAX_PASSES = 20
"""Over all processes, for one that starts others faster than they are killed."""


class Process(NamedTuple):
    parent: int
    group: int
    resident_bytes: int


def adopt_orphans() -> None:
    with suppress(ImportError, OSError):  # an interpreter without libffi
        import ctypes

        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def all_processes() -> dict[int, Process]:
    """Return those of this machine, by their numbers; those that have ended and were not waited for are among them."""
    found = {}
    for path in glob("/proc/[0-9]*/stat"):
        with suppress(OSError), open(path, "rb") as file:  # it has ended meanwhile
            # Behind the name, which may hold anything: state, parent, group, …; the 22nd is the number of resident pages.
            fields = file.read().rpartition(b")")[2].split()
            found[int(path.split("/")[2])] = Process(int(fields[1]), int(fields[2]), int(fields[21]) * PAGE_BYTES)
    return found


def descendants_of(pid: int, processes: Mapping[int, Process]) -> set[int]:
    """Return the processes below a process."""
    children: dict[int, list[int]] = {}
    for one, process in processes.items():
        children.setdefault(process.parent, []).append(one)
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = set(children.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found


def kill_with_descendants(leader: int) -> None:
    """Kill the leader of a group, the group, and whatever it has started."""
    with suppress(ProcessLookupError, PermissionError):  # it leads no group of its own yet, or is gone
        os.killpg(leader, signal.SIGSTOP)  # so that it starts nothing more
        _kill_outside_its_group(leader, leader)
        os.killpg(leader, signal.SIGKILL)


def end_with_descendants() -> None:
    """Kill what this process has started, and it and its group. Does not return."""
    _kill_outside_its_group(os.getpid(), os.getpgid(0))
    os.killpg(0, signal.SIGKILL)


def _kill_outside_its_group(pid: int, group: int) -> None:
    """The group ends at one stroke, behind this."""
    killed: set[int] = set()
    for _ in range(MAX_PASSES):
        processes = all_processes()
        found = {one for one in descendants_of(pid, processes) if processes[one].group != group} - killed
        if not found:
            return
        for one in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        killed |= found
