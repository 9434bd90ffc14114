"""Finding and killing all processes that a process has started, in any session.

    adopt_orphans (in the process)           orphaned descendants become its children, not those of init
    kill_with_descendants (outside)          kill the process and all descendants
    end_with_descendants (in the process)    the same, for the process itself
    end_if_forked (in the process)           a fork by user code ends instead of answering in its place

Invariant: killing a process that adopts orphans also kills its descendants outside its group and session.
They survive a process that exits on its own. This needs Linux; elsewhere only the group ends. Interpreters
without Slipstream also load this file by path, so it imports only the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from glob import glob
from typing import NamedTuple

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SET_CHILD_SUBREAPER = 36
"""Option of prctl(2)."""
MAX_PASSES = 20
"""Maximum number of passes over all processes, in case one starts others faster than they are killed."""


class ProcessEntry(NamedTuple):
    parent: int
    group: int
    resident_bytes: int


def adopt_orphans() -> None:
    with suppress(ImportError, OSError):  # the interpreter has no libffi
        import ctypes

        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def all_processes() -> dict[int, ProcessEntry]:
    """Return the processes of this machine by PID, including zombies."""
    found = {}
    for path in glob("/proc/[0-9]*/stat"):
        with suppress(OSError), open(path, "rb") as file:  # the process has ended
            # Fields after the name, which may contain anything: state, parent, group, …; the 22nd is the
            # number of resident pages.
            fields = file.read().rpartition(b")")[2].split()
            found[int(path.split("/")[2])] = ProcessEntry(int(fields[1]), int(fields[2]), int(fields[21]) * PAGE_BYTES)
    return found


def children_by_parent(processes: Mapping[int, ProcessEntry]) -> dict[int, list[int]]:
    """Return the PIDs of the children of each process that has any."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    return children


def descendants_of(pid: int, children: Mapping[int, Sequence[int]]) -> set[int]:
    """Return the PIDs of all descendants of a process, given the children of each."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = set(children.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found


def num_children(pid: int) -> int:
    """Return the number of children of a process, including zombies and adopted orphans.

    Unlike `all_processes`, this is cheap enough for every call. 0 where the kernel does not list children.
    """
    num = 0
    for path in glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError), open(path) as file:  # the thread has ended
            num += len(file.read().split())
    return num


def kill_with_descendants(*leaders: int) -> None:
    """Kill the leaders of process groups, the groups, and all descendants."""
    groups = {}
    for leader in leaders:
        with suppress(ProcessLookupError, PermissionError):  # it leads no group yet, or is gone
            os.killpg(leader, signal.SIGSTOP)  # so that it starts no more processes
            groups[leader] = leader
    if groups:
        _kill_outside_their_groups(groups)
    for leader in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def end_with_descendants() -> None:
    """Kill all descendants, this process and its group; does not return."""
    _kill_outside_their_groups({os.getpid(): os.getpgid(0)})
    os.killpg(0, signal.SIGKILL)


def end_if_forked(owner: int) -> None:
    """End this process unless it is `owner`.

    User code may fork itself. A fork that returns from it would answer and take calls in place of its owner.
    """
    if os.getpid() != owner:
        os._exit(1)


def _kill_outside_their_groups(groups: Mapping[int, int]) -> None:
    """Kill the descendants of processes outside the group of each; the caller then kills the groups at once.

    One look through the machine, which may have thousands of processes, serves all.
    """
    killed: set[int] = set()
    for _ in range(MAX_PASSES):
        processes = all_processes()
        children = children_by_parent(processes)
        found = {
            one for pid, group in groups.items() for one in descendants_of(pid, children)
            if processes[one].group != group
        } - killed  # fmt: skip
        if not found:
            return
        for one in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        killed |= found
