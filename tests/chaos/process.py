"""The processes of a run: start them, send signals to them, and find them among the children of others.

A fake run forks its processes from one that has imported everything, because a restarted process would need seconds for
its imports. A real run starts them as a user does. The audits are forked too: transformers loads garbage weights when
several threads of a process load models.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from learner.sandbox.start import ForkedChild
from protocol.signals import SHUTDOWN_SIGNALS

ROOT = Path(__file__).parent.parent.parent
LEARNER, FAKE_SERVER, SERVER = "tests.chaos.learner_process", "tests.chaos.fake_server", "tests.chaos.server_process"
"""Modules with `run(chaos_dir, arguments)`."""
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([LEARNER, FAKE_SERVER, "tests.chaos.versions", "transformers.models.gpt2.modeling_gpt2"])
STOP_TIMEOUT_S = 10.0


class Process:
    """One process of a server or learner, from start to end."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self.started_at = time.monotonic()
        self._handle = start()
        self.pid: int = self._handle.pid

    @property
    def exit_code(self) -> int | None:
        """None while the process runs. Negative: the signal that ended it."""
        if isinstance(self._handle, subprocess.Popen):
            return self._handle.poll()
        return self._handle.exitcode

    def find_child(self, words: str) -> int | None:
        """Return the process id of the first child with `words` in its command line."""
        try:
            children = psutil.Process(self.pid).children(recursive=True)
            return next((child.pid for child in children if words in " ".join(child.cmdline())), None)
        except psutil.NoSuchProcess:
            return None

    def kill(self) -> None:
        """Kill the process and its children, and wait for it."""
        try:
            everyone = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            everyone = []
        for process in everyone:
            strike(process.pid, signal.SIGKILL)
        self.reap()

    def reap(self) -> None:
        """Wait for the end of the process after a kill."""
        if isinstance(self._handle, subprocess.Popen):
            self._handle.wait(STOP_TIMEOUT_S)
        else:
            self._handle.join(STOP_TIMEOUT_S)


def start_forked(module: str, chaos_dir: Path, log: Path, arguments: list[str]) -> Process:
    return Process(lambda: ForkedChild(FORKED.Process(target=_in_session, args=(module, chaos_dir, log, arguments))))


def start_as_user(module: str, chaos_dir: Path, log: Path, arguments: list[str]) -> Process:
    def start() -> Any:
        with log.open("a") as output:
            return subprocess.Popen(
                [sys.executable, "-m", module, str(chaos_dir), *arguments],
                cwd=ROOT, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip

    return Process(start)


def _in_session(module: str, chaos_dir: Path, log: Path, arguments: list[str]) -> None:
    """Run a module in the forked process, as the leader of a session."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHUTDOWN_SIGNALS)  # the fork server blocks them
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    importlib.import_module(module).run(chaos_dir, arguments)


def strike(pid: int, number: int) -> bool:
    """Send a signal. Return False if the process does not exist."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def hang_up(pid: int) -> None:
    """Send SIGHUP to a session leader and its children, as a closing terminal does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGHUP)


def is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
