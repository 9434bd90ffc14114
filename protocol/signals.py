"""Signals that shut a process down cleanly, while its children keep running.

    terminal closed, ssh lost   SIGHUP to the process group, often more than once
    Ctrl-C                      SIGINT to the process group
    nohup                       SIGHUP is ignored from the start
    systemd, a reboot           SIGTERM to every process of the unit (KillMode=control-group)
    docker, Kubernetes          SIGTERM to the first process, then SIGKILL

Invariant: only the process that knows what to finish first acts on such a signal. Its children get the signal
too. If they exited, the process would lose the work that it still waits for.

`Interrupt` is the learner's: after the first signal, it finishes the step and writes a checkpoint. A second one
stops it at once. Copies of the first one, by whatever way they arrive, are no second signal.
"""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger(__name__)
SHUTDOWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORWARDED_WITHIN_S = 2.0
"""Time after the first signal in which a SIGTERM counts as a copy of it."""


def shutdown_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that shut this process down. Under nohup, SIGHUP stays ignored."""
    return tuple(
        number
        for number in SHUTDOWN_SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    )


def forces_exit(number: int, first_at: float) -> bool:
    """Return whether a signal after that of `first_at` (`time.monotonic`) means that the process must exit at once.

    A closing terminal sends SIGHUP more than once: the kernel does, and the shell. If every process of a unit gets
    a SIGTERM, a parent such as colocate or torchrun forwards its own to a child that has got one too.
    """
    is_forwarded = number == signal.SIGTERM and time.monotonic() - first_at < FORWARDED_WITHIN_S
    return number != signal.SIGHUP and not is_forwarded


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Shield processes started in the block, and their children, from these signals.

    This process must stop them, by SIGKILL or a message. Only this thread blocks the signals. A slow start
    belongs in another thread, so that the main thread receives the signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        # Before SIGINT and SIGTERM are blocked: the first process starts the tracker, and that start unblocks
        # both.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SHUTDOWN_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_shutdown_signals() -> None:
    """Ignore these signals, in a process that runs user code.

    Its own children get them as usual.
    """
    for number in SHUTDOWN_SIGNALS:
        signal.signal(number, lambda *_: None)  # children would inherit SIG_IGN or a blocked signal
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHUTDOWN_SIGNALS)


class Interrupt:
    """Signal handler with two stages.

    The first signal sets `requested`. A second one raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.is_elsewhere = False
        """True if another process of the run has got a signal, which is not a first one here."""
        self._first_at: float | None = None
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self._first_at is not None or self.is_elsewhere

    def __enter__(self) -> "Interrupt":
        for number in shutdown_signals():
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._first_at is not None:
            if forces_exit(number, self._first_at):
                raise KeyboardInterrupt
            return
        self._first_at = time.monotonic()
        log.warning("stopping after this step, with a checkpoint (interrupt again to stop now)")
