"""Server and learner on one node: `python -m deploy.colocate run.toml [--resume] [--dry-run] [--key value ...]`.

    starts both ─▶ prefixes their lines ─▶ passes signals on ─▶ ends the server when the learner ends, and the learner
    when the server ends

A run without GPUs whose config names no `cpu_cores` gets half of the cores for each process. Everything the two print
also goes to RUN_DIR/logs/.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from inference_server.config import ServerRun
from learner.config import LearnerRun
from protocol.config import load_config, to_toml, until_its_reader_leaves
from protocol.errors import ConfigError, SlipstreamError

GRACE_S = 20.0
"""Time a process gets to end by itself before it is killed."""
POLL_S = 0.2
LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may take a lock
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class Process:
    """One of the two, its output copied line by line to the console and to a file."""

    def __init__(self, name: str, command: list[str], log_file: Path) -> None:
        self.name = name
        self._popen = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"}, preexec_fn=_end_with_parent,
        )  # fmt: skip
        assert self._popen.stdout is not None
        self._copier = threading.Thread(target=self._copy, args=(self._popen.stdout, log_file), daemon=True)
        self._copier.start()

    def _copy(self, lines: IO[str], log_file: Path) -> None:
        with log_file.open("a") as file:
            for line in lines:
                file.write(line)
                sys.stdout.write(f"{self.name:>7} | {line}")
                sys.stdout.flush()

    def returncode(self) -> int | None:
        return self._popen.poll()

    def signal(self, number: int) -> None:
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    def end(self) -> int:
        """Ask it to end, wait, then kill its whole session; return its exit code."""
        self.signal(signal.SIGTERM)
        try:
            self._popen.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
        self._copier.join(GRACE_S)
        return self._popen.returncode


def _end_with_parent() -> None:
    """In the child: ask the kernel for a SIGTERM when colocate dies, however it dies."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def main() -> None:
    """Run both processes until the learner is done; exit with its code."""
    try:
        sys.exit(colocate(sys.argv[1:]))
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def colocate(arguments: list[str]) -> int:
    """Return the exit code of the learner, or 1 when the server ended first. Raises ConfigError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(__doc__, "\nThe keys: `inference-server --help` and `learner train --help`.", sep="")
        return 0
    switches = [argument for argument in arguments if argument in ("--resume", "--dry-run")]
    arguments = [argument for argument in arguments if argument not in switches]
    learner_flags, server_flags = _flags_of_each(arguments[1:])
    config_file = arguments[:1]
    server_run = load_config(ServerRun, config_file + server_flags, "python -m deploy.colocate")
    learner_run = load_config(LearnerRun, config_file + learner_flags, "python -m deploy.colocate")
    if "--dry-run" in switches:
        with until_its_reader_leaves():
            print(to_toml(server_run))  # each side reads the other's section as it stands in the file
        if note := learner_run.note_on_idle_keys():
            print(note, file=sys.stderr)
        return 0
    server_cores, learner_cores = _split_cores(server_run.server.cpu_cores, learner_run.learner.cpu_cores)
    logs = Path(learner_run.run_dir) / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run_dir = {logs.parent} cannot be written: {error}; choose another with --run-dir"
        ) from error

    python = [sys.executable, "-m"]
    server = Process(
        "server", [*python, "inference_server", *config_file, *server_flags, *server_cores], logs / "server.log"
    )
    learner = Process(
        "learner", [*python, "learner", "train", *config_file, *switches, *learner_flags, *learner_cores],
        logs / "learner.log",
    )  # fmt: skip
    return _supervise(server, learner)


def _supervise(server: Process, learner: Process) -> int:
    """Wait for the first to end, end the other; a signal goes to the learner, which then ends by itself."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: learner.signal(number))
    while server.returncode() is None and learner.returncode() is None:
        time.sleep(POLL_S)
    server_ended_first = learner.returncode() is None
    if server_ended_first:
        print(f"the server ended with exit code {server.returncode()}; ending the learner", file=sys.stderr)
    code = learner.end()
    server.end()
    return 1 if server_ended_first else code


def _flags_of_each(flags: list[str]) -> tuple[list[str], list[str]]:
    """Split `--learner.x 1 --server.y 2 --seed 3` into the learner's and the server's flags; shared ones go to both."""
    learner: list[str] = []
    server: list[str] = []
    targets = [learner, server]
    for flag in flags:
        if flag.startswith("--learner."):
            targets = [learner]
        elif flag.startswith("--server."):
            targets = [server]
        elif flag.startswith("--"):
            targets = [learner, server]
        for target in targets:
            target.append(flag)
    return learner, server


def _split_cores(server: tuple[int, ...] | None, learner: tuple[int, ...] | None) -> tuple[list[str], list[str]]:
    """Half of the cores each, unless the config says otherwise or GPUs do the work."""
    num_cores = len(os.sched_getaffinity(0))
    if server is not None or learner is not None or Path("/dev/nvidia0").exists() or num_cores < 2:
        return [], []
    half = num_cores // 2
    first, second = [str(i) for i in range(half)], [str(i) for i in range(half, num_cores)]
    return ["--server.cpu-cores", *first], ["--learner.cpu-cores", *second]


if __name__ == "__main__":
    main()
