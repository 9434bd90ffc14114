"""Which signals end a process in order, and how what it has started goes on until it has.

    terminal closed, ssh lost   SIGHUP to the process group, often more than once      Ctrl-C    SIGINT to the process group
    nohup                       SIGHUP is ignored from the start                       systemd   SIGTERM to every process of the unit
    docker, Kubernetes          SIGTERM to the first process, in the end SIGKILL

Invariant: only the process that knows what is to be finished first acts on such a signal. Its children get them too, and would take
with them what it still waits for.
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
    """What this thread starts meanwhile, and what that starts, gets no signal to end: its parent ends it, by SIGKILL or a word.

    Other threads get them as before, so a start that takes long belongs into another than the main one.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        # First: it is started along with the first process, holds back SIGINT and SIGTERM itself, and then lets them through.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, TO_END)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_parent() -> None:
    """In a process that runs the user's code: do nothing on these signals, which what it starts gets as usual."""
    for number in TO_END:
        signal.signal(number, _do_nothing)  # not SIG_IGN, nor held back: those are inherited
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_END)


def _do_nothing(*_: object) -> None:
    pass
