"""Traps: where the supervisor can stop a process; and events: what a process records for the supervisor.

A trap is a file that names a state. A process that reaches the state for the n-th time removes the file and stops
itself with SIGSTOP. The supervisor then commits the fault and continues the process. Events are lines in one file, with
times of the machine's monotonic clock. One more file slows the learner down. Product code knows none of these files:
the entry points of the processes wrap its functions.
"""

import asyncio
import contextlib
import functools
import inspect
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a process did at `time_s` of the monotonic clock."""

    time_s: float
    process: str
    pid: int
    name: str
    number: int = 0
    group: str = ""
    """Id of the group that the event is about."""
    server: int | None = None
    """Number of the server that the event is about. Not in the file: the reader sets it."""


class Traps:
    """The traps and events of one process, in files of `directory` named after the process."""

    def __init__(self, directory: Path, process: str) -> None:
        self.directory, self._process = directory, process
        self._events = os.open(directory / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._trap = trap_of(directory, process)
        self._num_visits: dict[bytes, int] = {}
        """Keyed by the content of the trap, which is unique for each fault."""

    def record(self, name: str, number: int = 0, group: str = "") -> None:
        now = time.monotonic()
        event = Event(time_s=now, process=self._process, pid=os.getpid(), name=name, number=number, group=group)
        os.write(self._events, msgspec.json.encode(event) + b"\n")  # one write: lines of two processes do not mix

    def is_sprung(self, state: str) -> bool:
        """Count a visit. Return True, once, at the visit that the trap is set for."""
        try:
            content = self._trap.read_bytes()
        except FileNotFoundError:
            return False
        wanted, nth, _ = content.decode().rsplit("/", 2)
        if wanted != state:
            return False
        self._num_visits[content] = self._num_visits.get(content, 0) + 1
        if self._num_visits[content] != int(nth):
            return False
        with contextlib.suppress(FileNotFoundError):
            self._trap.unlink()
        return True

    def reach(self, state: str) -> None:
        if self.is_sprung(state):
            os.kill(os.getpid(), signal.SIGSTOP)

    def make_hang(self, owner: Any, name: str) -> None:
        """Make a coroutine function never return when the trap of its name is sprung. Its process continues."""
        function = getattr(owner, name)

        @functools.wraps(function)
        async def hang_or_await(*args: Any) -> Any:
            if self.is_sprung(name):
                await asyncio.Event().wait()
            return await function(*args)

        setattr(owner, name, hang_or_await)

    def wrap(self, owner: Any, name: str, state: str) -> None:
        """Make a function of the product reach `state` on every call."""
        function = getattr(owner, name)

        @functools.wraps(function)
        async def reach_and_await(*args: Any, **kwargs: Any) -> Any:
            self.reach(state)
            return await function(*args, **kwargs)

        @functools.wraps(function)
        def reach_and_call(*args: Any, **kwargs: Any) -> Any:
            self.reach(state)
            return function(*args, **kwargs)

        setattr(owner, name, reach_and_await if inspect.iscoroutinefunction(function) else reach_and_call)


def slow_of(directory: Path) -> Path:
    """Return the file that limits the learner to one step per second, to leave the cores to other legs."""
    return directory / "slow"


def flip_of(port: int) -> str:
    """Return the name of the learner's trap that flips a byte of a broadcast to the server at this port."""
    return f"flip {port}"


def trap_of(directory: Path, process: str) -> Path:
    return directory / f"{process}.trap"


def set_trap(directory: Path, process: str, state: str, nth: int, number: int) -> Path:
    """Write the trap of fault `number` atomically. Return its file, which the process removes when it stops there."""
    trap = trap_of(directory, process)
    aside = trap.with_suffix(".tmp")
    aside.write_text(f"{state}/{nth}/{number}")
    aside.rename(trap)
    return trap
