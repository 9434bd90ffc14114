"""`learner train` as a process that is killed, or runs out of disk, at a named point, for tests of resumes."""

import contextlib
import os
import pkgutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from learner.config import LearnerRun
from learner.storage.files import replace_file
from protocol.config import to_toml
from tests.learner.forked_learner import end_of, start_learner
from tests.learner.ranks import ALONE, Place

LIFE_TIMEOUT_S = 120.0
BALLAST = "ballast"
POINTS = {
    "received": "learner.rollouts.ledger:Ledger.receive",
    "scored": "learner.rollouts.ledger:Ledger.score",
    "consumed": "learner.rollouts.ledger:Ledger.consume",
    "logged": "learner.report.run_log:RunLog.step",
    "generators saved": "learner.storage.writer:save_accelerator_state",
    "copied": "learner.storage.writer:CheckpointWriter.begin",
    "shards written": "learner.policy.shards:ShardWriter.write_data",
    "shards indexed": "learner.policy.shards:ShardWriter.finish",
    "reference linked": "os:link",
    "model exported": "learner.policy.published:Export.write",
    "checkpoint named": "learner.storage.writer:PendingCheckpoint.write",
    "old one unnamed": "pathlib:Path.rename",
    "best one named": "learner.storage.checkpoint:replace_file",
    "answer kept": "learner.evaluation.background:PartialResults.add",
    "evaluation noted": "learner.evaluation.results:record_evaluation",
    "answers forgotten": "learner.evaluation.background:PartialResults.forget",
    "old one removed": "learner.storage.retention:remove_checkpoint",
}
"""Functions after whose call the blow happens, by name of the point."""


class Death(msgspec.Struct, frozen=True):
    """SIGKILL at the moment when a process reaches a point for the n-th time."""

    point: str
    nth: int = 1

    def strike(self, run_dir: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class LateDeath(msgspec.Struct, frozen=True):
    """Hold the thread at the point until the main loop has logged another step; then SIGKILL."""

    point: str
    nth: int = 1

    def strike(self, run_dir: Path) -> None:
        lines = run_dir / "metrics.jsonl"
        num_lines, deadline = len(lines.read_text().splitlines()), time.monotonic() + LIFE_TIMEOUT_S / 2
        while len(lines.read_text().splitlines()) == num_lines and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL if time.monotonic() < deadline else signal.SIGABRT)


class FullDisk(msgspec.Struct, frozen=True):
    """Fill the disk of the run directory at the point, until BALLAST is removed."""

    point: str
    nth: int = 1

    def strike(self, run_dir: Path) -> None:
        with (run_dir / BALLAST).open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass


Blow = Death | LateDeath | FullDisk


class Life:
    """One process of a run, from its start or resume to its end."""

    def __init__(self, run: LearnerRun, blow: Blow | None = None, *, resume: bool, place: Place = ALONE) -> None:
        run_dir = Path(run.run_dir)
        config = run_dir.with_name(f"{run_dir.name}.toml")
        if place.rank == 0:
            replace_file(config, to_toml(run).encode())
        self._log = run_dir.with_name(f"{run_dir.name}-{place.rank}.log")
        arguments = ("train", str(config), *(["--resume"] if resume else []))
        self.process = start_learner(arguments, self._log, self._log, partial(_prepare, run_dir, blow, place))

    def end(self) -> int:
        """Wait for the process and return its exit code."""
        return end_of(self.process, self._log, LIFE_TIMEOUT_S)

    @property
    def log(self) -> str:
        """Output of this process and of earlier ones of the same run."""
        return self._log.read_text()


def live(run: LearnerRun, *deaths: Death | LateDeath) -> None:
    """Run to the end, with a resume after each of the deaths."""
    for i, death in enumerate([*deaths, None]):
        life = Life(run, death, resume=i > 0)
        assert life.end() == (0 if death is None else -signal.SIGKILL), f"{death}:\n{life.log}"


def _prepare(run_dir: Path, blow: Blow | None, place: Place) -> None:
    place.enter()
    if blow is not None:
        _await(blow, run_dir)


def _await(blow: Blow, run_dir: Path) -> None:
    module, _, attribute = POINTS[blow.point].partition(":")
    *path, name = attribute.split(".")
    owner: Any = pkgutil.resolve_name(f"{module}:{'.'.join(path)}" if path else module)
    original: Callable[..., Any] = getattr(owner, name)
    num_reached = 0

    def reach(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_reached
        result = original(*args, **kwargs)
        num_reached += 1
        if num_reached == blow.nth:
            blow.strike(run_dir)
        return result

    setattr(owner, name, reach)
