"""Start processes that run user code, and make them end with the learner."""

import io
import multiprocessing
import os
import socket
import struct
import sys
import threading
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess

from learner.sandbox.descendants import adopt_orphans, end_with_descendants
from protocol.signals import held_from_children, leave_to_parent

_LOOKING = threading.Lock()
"""Lock for polling child processes. multiprocessing polls all of them whenever it starts one. If two threads
poll an ended process of the fork server at once, one of them reads exit code 255, whatever it was."""


def start_child(process: BaseProcess) -> None:
    with _LOOKING, held_from_children():  # the child unblocks signals in end_with_the_learner
        process.start()


def start_fork_server() -> None:
    """Start the fork server, if it is not running.

    It is shielded from signals: if it ended, the learner would lose track of all forked processes.
    """
    with _LOOKING, held_from_children():
        forkserver.ensure_running()


class ForkedProcess:
    """Process started by a fork server, safe for use from several threads."""

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
    """Let reads and writes of a message fail with BlockingIOError after `timeout_s`.

    A stopped process neither reads nor writes, so its peer would wait forever.
    """
    with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as view:
        seconds, fraction = divmod(timeout_s, 1)
        timeout = struct.pack("ll", int(seconds), int(fraction * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            view.setsockopt(socket.SOL_SOCKET, option, timeout)


def end_with_the_learner() -> None:
    """Make this process and its descendants end with the learner.

    Call this in the process, which then leads its own session and leaves signals to the learner. It prints to
    stderr, because stdout belongs to the learner's command (`--json`).
    """
    leave_to_parent()
    os.setsid()
    adopt_orphans()
    print_as_errors()
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def print_as_errors() -> None:
    """Redirect stdout to stderr, line by line.

    The process may be killed at any moment, so nothing may wait in a buffer.
    """
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    end_with_descendants()
