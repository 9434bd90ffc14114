"""`learner train` as a process of its own that meets its end at a named point, for tests of what a resume makes of it.

Forked from a process that has imported everything, so that a life costs about as much as what happens in it.
"""

import contextlib
import os
import pkgutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

import learner.train  # noqa: F401  (for the fork server)
from learner.__main__ import main
from learner.config import LearnerRun
from learner.storage.disk import replace_file
from protocol.config import to_toml
from tests.learner.training.sharding import FSDP2, shard_on_cpu
from tests.peer import PROCESSES

LIFE_TIMEOUT_S = 120.0
BALLAST = "ballast"
POINTS = {
    "received": "learner.rollouts.ledger:Ledger.receive",
    "scored": "learner.rollouts.ledger:Ledger.score",
    "consumed": "learner.rollouts.ledger:Ledger.consume",
    "logged": "learner.report.run_log:RunLog.step",
    "state saved": "accelerate:Accelerator.save_state",
    "shards saved": "learner.storage.checkpoint:save_sharded",
    "model exported": "learner.storage.checkpoint:export_policy",
    "checkpoint named": "learner.storage.retention:save_checkpoint",
    "old one unnamed": "pathlib:Path.rename",
    "old one removed": "learner.storage.retention:remove_checkpoint",
}
"""What has just been called when the blow falls."""


class Death(msgspec.Struct, frozen=True):
    """SIGKILL the moment a process has come to a point for the n-th time."""

    point: str
    nth: int = 1

    def strike(self, run_dir: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FullDisk(msgspec.Struct, frozen=True):
    """The disk of the run directory has no byte left from that moment on, until BALLAST is removed."""

    point: str
    nth: int = 1

    def strike(self, run_dir: Path) -> None:
        with (run_dir / BALLAST).open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass


class Place(msgspec.Struct, frozen=True):
    """A rank among others, as torchrun tells it."""

    rank: int
    num_ranks: int
    port: int
    is_sharded: bool = False

    def enter(self) -> None:
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank), "WORLD_SIZE": str(self.num_ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "ACCELERATE_USE_CPU": "true"}
        if self.is_sharded:
            os.environ |= FSDP2
            shard_on_cpu()


ALONE = Place(rank=0, num_ranks=1, port=0)


def two_places(*, is_sharded: bool) -> list[Place]:
    """Of two ranks that will find each other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return [Place(rank=rank, num_ranks=2, port=port, is_sharded=is_sharded) for rank in range(2)]


class Life:
    """One process of a run, from its start or resume to its end."""

    def __init__(
        self, run: LearnerRun, blow: Death | FullDisk | None = None, *, resume: bool, place: Place = ALONE
    ) -> None:
        run_dir = Path(run.run_dir)
        config = run_dir.with_name(f"{run_dir.name}.toml")
        if place.rank == 0:
            replace_file(config, to_toml(run).encode())
        self._log = run_dir.with_name(f"{run_dir.name}-{place.rank}.log")
        command = ["learner", "train", str(config), *(["--resume"] if resume else [])]
        self.process = PROCESSES.Process(target=_live, args=(command, run_dir, blow, place, self._log))
        self.process.start()

    def end(self) -> int:
        """Wait for it; return its exit code."""
        self.process.join(LIFE_TIMEOUT_S)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"it lived on after {LIFE_TIMEOUT_S} s:\n{self.log}")
        return self.process.exitcode

    @property
    def log(self) -> str:
        """What it wrote, and what those before it did."""
        return self._log.read_text()


def live(run: LearnerRun, *deaths: Death) -> None:
    """Start a run, let it die so often, and resume it every time, to its end."""
    for i, death in enumerate([*deaths, None]):
        life = Life(run, death, resume=i > 0)
        assert life.end() == (0 if death is None else -signal.SIGKILL), f"{death}:\n{life.log}"


def _live(command: list[str], run_dir: Path, blow: Death | FullDisk | None, place: Place, log: Path) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    if place.num_ranks > 1:
        place.enter()
    if blow is not None:
        _await(blow, run_dir)
    sys.argv = command
    main()


def _await(blow: Death | FullDisk, run_dir: Path) -> None:
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
