"""What the processes that run the user's code have in common. Imports nothing else of the learner."""

import io
import multiprocessing
import os
import socket
import struct
import sys
import threading
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess

from learner.descendants import adopt_orphans, end_with_descendants
from protocol.signals import held_from_children, leave_to_parent

_LOOKING = threading.Lock()
"""multiprocessing looks at all of its processes whenever it starts one. Of two threads that look at once at one that was forked by its
server and has ended, one reads the exit code 255, whatever it was."""


def start_child(process: BaseProcess) -> None:
    with _LOOKING, held_from_children():  # the child unblocks them in end_with_the_learner
        process.start()


def start_fork_server() -> None:
    """Start the process that forks others, if there is none. With it the learner would lose sight of all of them, so no signal ends it."""
    with _LOOKING, held_from_children():
        forkserver.ensure_running()


class Forked:
    """A process of a forkserver's, started, that several threads may look at."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        start_child(process)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        with _LOOKING:
            return self._process.exitcode

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float) -> None:
        connection.wait([self._process.sentinel], timeout)
        with _LOOKING:
            self._process.join(0)


def limit_waits(pipe: connection.Connection, timeout_s: float) -> None:
    """A stopped process neither reads nor writes on: let what waits for it within a message fail, with BlockingIOError."""
    with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as view:
        seconds, fraction = divmod(timeout_s, 1)
        timeout = struct.pack("ll", int(seconds), int(fraction * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            view.setsockopt(socket.SOL_SOCKET, option, timeout)


def end_with_the_learner() -> None:
    """Lead a session of its own that ends with the learner, with all that it has started; leave signals to the learner, and what a command
    prints (`--json`). Call it in the process.
    """
    leave_to_parent()
    os.setsid()
    adopt_orphans()
    print_as_errors()
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def print_as_errors() -> None:
    """Let what this process prints go where its errors go, line by line: it may be killed at any moment."""
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    end_with_descendants()
