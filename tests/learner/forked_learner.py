"""Run `learner …` in a process forked from one that has imported everything, so that it starts quickly.

Exit code, output and signals are those of a real process. The start of a new interpreter is tested by tests that run
`python -m learner`.
"""

import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import learner.doctor.self_test
import learner.report.page
import learner.train  # noqa: F401  (these are for the fork server)
from learner.__main__ import main
from protocol.hardware import has_gpu
from protocol.signals import SHUTDOWN_SIGNALS
from tests.peer import PROCESSES

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 100.0

Process = multiprocessing.process.BaseProcess


def run_learner(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    with tempfile.TemporaryDirectory() as directory:
        out, err = Path(directory, "out"), Path(directory, "err")
        process = start_learner(arguments, out, err)
        code = end_of(process, err)
        return subprocess.CompletedProcess(["learner", *arguments], code, out.read_text(), err.read_text())


def start_learner(
    arguments: tuple[str, ...], out: Path, err: Path, prepare: Callable[[], None] | None = None
) -> Process:
    """Start a command that appends to these files, which may be the same. `prepare` runs in the process first.

    On a GPU it is a new interpreter: CUDA does not work in a fork of a process that has asked torch for it.
    """
    processes = multiprocessing.get_context("spawn") if has_gpu() else PROCESSES
    process = processes.Process(target=_live, args=(arguments, out, err, prepare))
    process.start()
    return process


def end_of(process: Process, log: Path, timeout_s: float = TIMEOUT_S) -> int:
    """Wait for the process and return its exit code."""
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"the process did not end within {timeout_s:g} s:\n{log.read_text()}")
    return process.exitcode


def _live(arguments: tuple[str, ...], out: Path, err: Path, prepare: Callable[[], None] | None) -> None:
    # The fork server may be that of environments, which blocks these signals.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SHUTDOWN_SIGNALS)
    for descriptor, path in ((1, out), (2, err)):
        with path.open("a") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(ROOT)
    if prepare is not None:
        prepare()
    sys.argv = ["learner", *arguments]
    main()
