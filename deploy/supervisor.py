"""The supervisor of the servers and ranks of a run, from start to end.

    start servers and learner ─▶ wait for one to exit ─┬▶ restart it, if its code, the config and the limit allow it
                                                       └▶ stop the learner, then the servers
    a signal ─▶ every rank, which finishes its step and writes a checkpoint ─▶ the learner exits ─▶ stop the servers

All ranks of a learner start and exit together. A process gets a SIGTERM before it is killed. colocate's are
child processes (`SupervisedProcess`), those of Ray may be on other nodes (ray_cluster.py).
Invariants: `run` leaves no process behind. If colocate dies, the kernel sends each process a SIGTERM.
"""

import ctypes
import logging
import os
import signal
import subprocess
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from deploy.placement import DeployConfig
from protocol import console
from protocol.errors import USER_ERROR
from protocol.signals import shutdown_signals

log = logging.getLogger(__name__)

GRACE_S = 20.0
"""Seconds a server gets to exit after SIGTERM before it is killed."""
LEARNER_GRACE_S = 900.0
"""Seconds the ranks get, which finish their step and write a checkpoint."""
LIBC = ctypes.CDLL(None)  # loaded at import: nothing may take a lock between fork and exec
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
POLL_S = 0.2
RANKS_END_S = 30.0
"""Seconds the other ranks get to exit after one has died.

They notice the death automatically (learner/rank_watch.py)."""
RESTART_AFTER_S = 1.0
WINDOW_S = 3600.0
"""Length of the window in which restarts are counted."""


class Process(Protocol):
    """A process of the run, on this node or another."""

    name: str

    @property
    def returncode(self) -> int | None:
        """Exit code, or None while the process runs."""

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has exited."""

    def wait(self, give_up_at: float) -> None:
        """Wait for the process and its output; at `give_up_at` (`time.monotonic`), kill it."""


class SupervisedProcess:
    """A child process whose output is copied to the console, prefixed, and to a file."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], log_file: Path) -> None:
        self.name = name
        self._popen = start_process(command, environment, signal.SIGTERM)
        output = self._popen.stdout
        assert output is not None

        def copy() -> None:
            with output:
                copy_output(name, output, log_file)

        self._copier = threading.Thread(target=copy, daemon=True)
        self._copier.start()

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def signal(self, number: int) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def wait(self, give_up_at: float) -> None:
        """Wait for the process and its output; at `give_up_at`, kill its whole session."""
        try:
            self._popen.wait(max(0.0, give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
        self._copier.join(GRACE_S)


def start_process(command: Sequence[str], environment: dict[str, str], signal_of_orphan: int) -> subprocess.Popen[str]:
    """Start a process with its output in a pipe. If this thread ends first, the kernel sends `signal_of_orphan`."""

    def prepare_child() -> None:
        LIBC.prctl(PR_SET_PDEATHSIG, signal_of_orphan)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks SIGINT in the threads of actors

    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=1, start_new_session=True,
        encoding="utf-8", errors="backslashreplace",
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment, preexec_fn=prepare_child,
    )  # fmt: skip


def copy_output(name: str, lines: Iterable[str], log_file: Path) -> None:
    """Copy the lines of a process to the console, prefixed with its name, and to its file.

    Reads to the end, even if a line cannot be written: a process whose output nobody reads would block.
    """
    is_complete = True
    for line in lines:
        try:
            with log_file.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            if is_complete:
                log.warning("output of %s cannot be written to %s: %s", name, log_file, error)
            is_complete = False
        console.relay(name, line.rstrip("\n"))


def wait_for(processes: Sequence[Process], timeout_s: float) -> None:
    """Wait for all processes to exit, and kill those still running after `timeout_s`."""
    give_up_at = time.monotonic() + timeout_s
    for process in processes:
        process.wait(give_up_at)


class StartLearner(Protocol):
    """A function that starts all ranks. `again`: earlier ranks of this run failed."""

    def __call__(self, *, again: bool) -> Sequence[Process]: ...


class Supervisor:
    """The supervisor of one run of colocate or Ray."""

    def __init__(
        self,
        start_server: Mapping[str, Callable[[], Process]],
        start_learner: StartLearner,
        config: DeployConfig,
    ) -> None:
        self._start_server, self._start_learner, self._config = start_server, start_learner, config
        self._servers: dict[str, Process] = {}
        self._ranks: Sequence[Process] = []
        self._restarts: dict[str, deque[float]] = defaultdict(deque)
        self._is_stopping = False
        self._missed: int | None = None
        """Signal received while no rank was running, to be sent to the next ranks."""

    def run(self) -> int:
        """Return the learner's exit code, or 1 if a server exited first."""
        for number in shutdown_signals():
            signal.signal(number, lambda number, frame: self._pass_on(number))
        try:
            for name, start in self._start_server.items():
                self._servers[name] = start()
            if not self._is_stopping:
                self._start_ranks(again=False)
            while (code := self._code()) is None:
                time.sleep(POLL_S)
            return code
        finally:
            if not self._is_stopping:  # a second signal would stop the ranks at once
                for rank in self._ranks:
                    rank.signal(signal.SIGTERM)
            wait_for(self._ranks, LEARNER_GRACE_S)
            for server in self._servers.values():
                server.signal(signal.SIGTERM)
            wait_for(list(self._servers.values()), GRACE_S)

    def _pass_on(self, number: int) -> None:
        """Forward a signal to the ranks, or keep it until they start.

        When the learner shuts down cleanly, the whole run is over.
        """
        self._is_stopping = True
        if all(rank.returncode is not None for rank in self._ranks):
            self._missed = number
        for rank in self._ranks:
            rank.signal(number)

    def _start_ranks(self, *, again: bool) -> None:
        self._ranks = []
        self._ranks = self._start_learner(again=again)
        if self._missed is not None:
            self._pass_on(self._missed)

    def _code(self) -> int | None:
        """Return the exit code of the whole run, or None to keep it running."""
        codes = [rank.returncode for rank in self._ranks]
        if failed := [code for code in codes if code]:
            wait_for(self._ranks, RANKS_END_S)
            return None if self._restart_learner() else failed[0]
        if None not in codes:
            return 0
        for name, server in self._servers.items():
            if server.returncode is not None and not self._restart_server(name, server.returncode):
                return 1
        return None

    def _restart_server(self, name: str, code: int) -> bool:
        if not self._may_restart(name, {name: code}):
            return False
        self._servers[name] = self._start_server[name]()
        return True

    def _restart_learner(self) -> bool:
        if not self._may_restart("learner", {rank.name: rank.returncode for rank in self._ranks if rank.returncode}):
            return False
        self._start_ranks(again=True)
        return True

    def _may_restart(self, name: str, codes: Mapping[str, int]) -> bool:
        """Decide whether to restart the processes that exited with these codes, and print the decision."""
        if self._is_stopping:
            return False
        ended = ", ".join(f"{process} exited with code {code}" for process, code in codes.items())
        # A rank that another one has stopped (RankFailed) exits with this code too, so the other's code decides.
        if set(codes.values()) == {USER_ERROR}:
            log.warning("%s, an error that a restart does not solve; stopping all processes", ended)
            return False
        recent, limit = self._restarts[name], self._config.max_restarts
        while recent and recent[0] < time.monotonic() - WINDOW_S:
            recent.popleft()
        if self._config.restart == "never" or len(recent) >= limit:
            too_often = f" after {limit} restarts within an hour (deploy.max_restarts)" if recent else ""
            log.warning("%s%s; stopping all processes", ended, too_often)
            return False
        recent.append(time.monotonic())
        log.warning("%s; restarting it (%d of %d within an hour)", ended, len(recent), limit)
        time.sleep(RESTART_AFTER_S)
        return not self._is_stopping
