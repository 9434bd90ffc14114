"""One side of a push, in a process forked from one with all imports, so that a killed side restarts quickly."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.push_peers import ANSWER_TIMEOUT_S, LearnerSetup, run_learner, run_server

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.push_peers", "tests.learner.mortal_learner"])
# Gloo, between the ranks of a learner, logs a stack trace for every lost peer. The variable is read when the fork
# server imports torch.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


class Peer:
    """One side of a push: its process, pipe and log."""

    def __init__(self, run: Callable[..., None], log: Path, *args: Any) -> None:
        self._log = log
        self._log_start = len(self.log)
        self._pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=run, args=(theirs, log, *args), daemon=True)
        self.process.start()
        theirs.close()
        assert self.process.pid is not None
        self.pid: int = self.process.pid
        assert self.receive() == "ready"

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    @property
    def own_log(self) -> str:
        """Log of this process, without those of earlier ones."""
        return self.log[self._log_start :]

    def send(self, command: Any) -> None:
        self._pipe.send(command)

    def receive(self) -> Any:
        assert self._pipe.poll(ANSWER_TIMEOUT_S), f"no answer within {ANSWER_TIMEOUT_S} s; its log:\n{self.own_log}"
        return self._pipe.recv()

    def ask(self, command: Any) -> Any:
        self.send(command)
        return self.receive()

    def wait_for_log(self, text: str, timeout_s: float) -> str:
        """Wait for a line with `text` and return it."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            lines = [line for line in self.own_log.splitlines() if text in line]
            if lines:
                return lines[0]
            assert time.monotonic() < give_up_at, f"no {text!r} within {timeout_s} s in:\n{self.own_log}"
            time.sleep(0.01)

    def wait_until_struck(self, signal_number: int) -> None:
        """Wait until the signal of a trap has killed or stopped the process."""
        give_up_at = time.monotonic() + ANSWER_TIMEOUT_S
        while not self._is_struck(signal_number):
            assert time.monotonic() < give_up_at, f"the trap was not reached; the log:\n{self.own_log}"
            time.sleep(0.005)

    def _is_struck(self, signal_number: int) -> bool:
        if signal_number == signal.SIGKILL:
            return not self.process.is_alive()
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def resources(self) -> dict[str, int]:
        process = psutil.Process(self.pid)
        return {
            "threads": process.num_threads(),
            "file descriptors": process.num_fds(),
            "children": len(process.children(recursive=True)),
        }

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


class Pair:
    """A server and a learner, each of which can be restarted."""

    def __init__(self, directory: Path, endpoint: str, *, overlap_weight_loading: bool = False, **push: Any) -> None:
        self._directory, self._endpoint = directory, endpoint
        self._receive_overlap, self._push = overlap_weight_loading, push
        self.server, self.learner = self.start_server(), self.start_learner()

    def start_server(self) -> Peer:
        self.server = Peer(run_server, self._directory / "server.log", self._endpoint, self._receive_overlap)
        return self.server

    def start_learner(self) -> Peer:
        setup = LearnerSetup(endpoint=self._endpoint, weight_sync=self._push)
        self.learner = Peer(run_learner, self._directory / "learner.log", setup)
        return self.learner

    def kill(self) -> None:
        self.learner.kill()
        self.server.kill()
