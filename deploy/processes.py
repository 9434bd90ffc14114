"""A process that colocate started: its lines prefixed, its end asked for and, in the end, enforced.

Between a command and supervisor.py. Invariant: when colocate dies, however it dies, the kernel tells the process to end.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

GRACE_S = 20.0
"""Time a process gets to end by itself before it is killed."""
NAME_WIDTH = 8
LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may take a lock
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class Process:
    """Its output is copied line by line to the console and to a file."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], log_file: Path) -> None:
        self.name = name
        self._popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment, preexec_fn=_end_with_parent,
        )  # fmt: skip
        assert self._popen.stdout is not None
        self._copier = threading.Thread(target=self._copy, args=(self._popen.stdout, log_file), daemon=True)
        self._copier.start()

    def _copy(self, lines: IO[str], log_file: Path) -> None:
        with log_file.open("a") as file:
            for line in lines:
                file.write(line)
                sys.stdout.write(f"{self.name:>{NAME_WIDTH}} | {line}")
                sys.stdout.flush()

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def signal(self, number: int) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def wait(self, give_up_at: float) -> None:
        """Until it has ended, or kill its whole session; then until its last line has been copied."""
        try:
            self._popen.wait(max(0.0, give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
        self._copier.join(GRACE_S)


def end(processes: Sequence[Process], grace_s: float = GRACE_S) -> None:
    """Ask them all to end, wait, then kill those that are left."""
    for process in processes:
        process.signal(signal.SIGTERM)
    wait_for(processes, grace_s)


def wait_for(processes: Sequence[Process], patience_s: float) -> None:
    """Until all have ended; kill those that have not by then."""
    give_up_at = time.monotonic() + patience_s
    for process in processes:
        process.wait(give_up_at)


def _end_with_parent() -> None:
    """In the child: ask the kernel for a SIGTERM when colocate dies."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
