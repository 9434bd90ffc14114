"""Helpers inside the processes that run user code, started by `start.py`.

Invariant: the process and everything that it has started end with the learner.
"""

import io
import multiprocessing
import os
import sys
import threading
from multiprocessing import connection

from learner.sandbox.descendants import adopt_orphans, end_with_descendants
from protocol.signals import leave_to_parent


def end_with_the_learner() -> None:
    """Make this process and its descendants end with the learner.

    The process then leads its own session and leaves signals to the learner. It prints to stderr, because
    stdout belongs to the learner's command (`--json`).
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
