"""The list of runs below a directory, one line each: `slipstream runs [DIR]`.

    config.toml, the last line of metrics.jsonl, the kernel's list of locks ─▶ Run ─▶ a table, or JSON

`slipstream runs` changes nothing and takes no lock, so it never blocks a learner that starts.
From metrics.jsonl, it reads only the last step.
"""

import json
import os
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from learner.report.summary import RunDirectoryError, aligned, duration, number
from learner.storage.files import last_line

MAX_DEPTH = 3
"""Maximum number of directories between the given directory and a run."""
LOCKS, MOUNTS = Path("/proc/locks"), Path("/proc/self/mountinfo")

RunState = Literal["running", "finished", "stopped", "unreadable"]


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a run that need no full read of its files."""

    path: str
    state: RunState
    """State of the run. running: a learner on this machine has it open; stopped: no learner, steps left."""
    step: int = 0
    steps: int = 0
    """Number of steps in the config."""
    reward: float | None = None
    """Mean reward of the newest step."""
    elapsed_s: float = 0.0
    newest_at: float | None = None
    """End of the newest step, in seconds since 1970."""
    model: str = ""
    problem: str = ""
    """Reason for the state "unreadable"."""


def list_runs(directory: Path) -> list[ListedRun]:
    """Return the runs, newest first. Raises RunDirectoryError if there are none."""
    if not directory.is_dir():
        raise RunDirectoryError(
            f"{directory} is not a directory; use the directory of your runs: `slipstream runs DIR`"
        )
    locked = locked_files()
    runs = [read_run(path, locked) for path in _run_dirs(directory, MAX_DEPTH)]
    if not runs:
        raise RunDirectoryError(
            f"no run in {directory} or up to {MAX_DEPTH} directories below it; start one with `slipstream train`, or "
            "use another directory: `slipstream runs DIR`"
        )
    return sorted(runs, key=lambda run: run.newest_at or 0.0, reverse=True)


def read_run(path: Path, locked: set[tuple[int, int]]) -> ListedRun:
    """Read one run. `locked` has the device and inode of each locked file."""
    try:
        config = tomllib.loads((path / "config.toml").read_text("utf-8"))
        steps, model = int(config["learner"]["steps"]), str(config["model"])
        metrics = path / "metrics.jsonl"
        raw = last_line(metrics) if metrics.is_file() else b""
        newest = json.loads(raw) if raw else {}
        if not isinstance(newest, dict):
            raise ValueError(f"the last line of {metrics} is a JSON {type(newest).__name__}; expected an object")
        step, lock = int(newest.get("step", 0)), path / ".lock"
        is_open = bool(locked) and lock.exists() and (device_of(lock), lock.stat().st_ino) in locked
    except (OSError, ValueError, KeyError, TypeError) as error:
        return ListedRun(path=str(path), state="unreadable", problem=f"{type(error).__name__}: {error}")
    return ListedRun(
        path=str(path),
        state="running" if is_open else "finished" if step >= steps else "stopped",
        step=step,
        steps=steps,
        reward=newest.get("reward/mean"),
        elapsed_s=newest.get("elapsed_s", 0.0),
        newest_at=newest.get("time"),
        model=model,
    )


def locked_files() -> set[tuple[int, int]]:
    """Return the device and inode of each file on this machine with a flock.

    A learner holds such a lock on its run's `.lock`.
    """
    locked = set()
    for line in LOCKS.read_text("utf-8").splitlines() if LOCKS.exists() else []:
        _, kind, *_, device_and_inode, _, _ = line.split()
        if kind == "FLOCK":
            major, minor, inode = device_and_inode.split(":")
            locked.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return locked


def device_of(path: Path) -> int:
    """Return the device that LOCKS shows for a file: that of its mount.

    It differs from st_dev on btrfs, where each subvolume has its own, and on overlayfs.
    """
    descriptor = os.open(path, os.O_PATH)
    try:
        info = Path(f"/proc/self/fdinfo/{descriptor}").read_text("utf-8")
        st_dev = os.stat(descriptor).st_dev
    finally:
        os.close(descriptor)
    (mount,) = (line.split()[1] for line in info.splitlines() if line.startswith("mnt_id:"))
    for line in MOUNTS.read_text("utf-8").splitlines():
        number, _, device, *_ = line.split()
        if number == mount:
            major, minor = device.split(":")
            return os.makedev(int(major), int(minor))
    return st_dev  # a mount outside of a chroot is not listed


def _run_dirs(directory: Path, depth: int) -> Iterator[Path]:
    """Yield run directories without descending into them: checkpoints are many files."""
    if (directory / "config.toml").is_file() and (directory / ".lock").exists():
        yield directory
    elif depth >= 0:
        for entry in sorted(directory.iterdir()):
            if entry.is_dir() and not entry.is_symlink() and os.access(entry, os.R_OK | os.X_OK):
                yield from _run_dirs(entry, depth - 1)


def as_table(runs: list[ListedRun]) -> str:
    return aligned([("run", "state", "step", "reward", "trained for", "last step", "model"), *map(_row, runs)])


def _row(run: ListedRun) -> tuple[str, ...]:
    if run.state == "unreadable":
        return (run.path, run.state, run.problem, "", "", "", "")
    ago = "–" if run.newest_at is None else f"{duration(max(0.0, time.time() - run.newest_at))} ago"
    return (
        run.path,
        run.state,
        f"{run.step:,}/{run.steps:,}",
        number(run.reward),
        duration(run.elapsed_s),
        ago,
        run.model,
    )
