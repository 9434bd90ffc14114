"""What the processes under fault tell the supervisor, and where it can make them stand still.

A trap is a file that names a state. The process that comes to the state for the n-th time takes the file away and stops
itself by SIGSTOP; the supervisor sees it stopped, does the fault, and lets it go on. Events are lines in one file, with the
clock that all processes of a machine share. One more file asks the learner to take its time. Product code knows of none of them: the
process entries wrap its functions.
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
    """Something a process did, at `time_s` of the monotonic clock."""

    time_s: float
    process: str
    pid: int
    name: str
    number: int = 0
    group: str = ""
    """Which it is about."""
    server: int | None = None
    """Which of the run's servers it is of, or about. Not told: known by whoever reads."""


class Traps:
    """One process's side. Files lie in `directory`, named after the process."""

    def __init__(self, directory: Path, process: str) -> None:
        self.directory, self._process = directory, process
        self._events = os.open(directory / "events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._trap = trap_of(directory, process)
        self._num_visits: dict[bytes, int] = {}
        """By the trap's content, which is new for every fault."""

    def tell(self, name: str, number: int = 0, group: str = "") -> None:
        now = time.monotonic()
        event = Event(time_s=now, process=self._process, pid=os.getpid(), name=name, number=number, group=group)
        os.write(self._events, msgspec.json.encode(event) + b"\n")  # one write: lines of two processes do not mix

    def is_sprung(self, state: str) -> bool:
        """Count a visit; True, once, if it is the one the trap is set for."""
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
        """Make a coroutine function never return when the trap of its name is sprung. Only it: its process goes on."""
        function = getattr(owner, name)

        @functools.wraps(function)
        async def hang_or_await(*args: Any) -> Any:
            if self.is_sprung(name):
                await asyncio.Event().wait()
            return await function(*args)

        setattr(owner, name, hang_or_await)

    def wrap(self, owner: Any, name: str, state: str) -> None:
        """Make a function of the product stand at `state` whenever it is called."""
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
    """While this file is there nobody waits for steps, and each may take a second: hundreds would cost the cores that other legs need."""
    return directory / "slow"


def flip_of(port: int) -> str:
    """Return the name of the learner's trap that flips a byte on its way to the server that it reaches at this port."""
    return f"flip {port}"


def trap_of(directory: Path, process: str) -> Path:
    return directory / f"{process}.trap"


def set_trap(directory: Path, process: str, state: str, nth: int, number: int) -> Path:
    """Write the trap of fault `number` in one move; return its file, which is gone once the process stands in it."""
    trap = trap_of(directory, process)
    aside = trap.with_suffix(".tmp")
    aside.write_text(f"{state}/{nth}/{number}")
    aside.rename(trap)
    return trap
