"""Which signals end a process in order, and how its children go on until it has ended.

    terminal closed, ssh lost   SIGHUP to the process group, often more than once
    Ctrl-C                      SIGINT to the process group
    nohup                       SIGHUP is ignored from the start
    systemd                     SIGTERM to every process of the unit (KillMode=control-group)
    docker, Kubernetes          SIGTERM to the first process, then SIGKILL

Invariant: only the process that knows what to finish first acts on such a signal. Its children get the signal too; if they
ended, they would take with them what it still waits for.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

TO_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signals_to_end() -> tuple[signal.Signals, ...]:
    """Return those that end this process in order: under nohup SIGHUP stays ignored."""
    return tuple(
        number for number in TO_END if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    )


def is_impatient(number: int) -> bool:
    """Whether such a signal, after another, means that the process is to end at once.

    A terminal that closes sends SIGHUP more than once: the kernel does, and the shell.
    """
    return number != signal.SIGHUP


@contextmanager
def held_from_children() -> Iterator[None]:
    """Start processes that get no signal to end, nor do their children: this process must end them, by SIGKILL or a message.

    Blocks the signals in this thread alone. A start that takes long belongs in a thread, so that the main one gets them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        # Before SIGINT and SIGTERM are blocked: the start of the tracker, which the first process needs, unblocks both.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, TO_END)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """Ignore signals to end, in a process that runs the user's code. Its own children get them as usual."""
    for number in TO_END:
        signal.signal(number, _do_nothing)  # SIG_IGN and a blocked signal would be inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_END)


def _do_nothing(*_: object) -> None:
    pass
