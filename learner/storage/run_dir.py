"""The directory of one run: who may write into it, and where each file is.

A run never overwrites another's: an existing run is resumed with --resume and the same config, or refused.
"""

import fcntl
import tomllib
import uuid
from pathlib import Path
from typing import Any

from learner.config import LearnerRun
from learner.storage.disk import replace_file
from protocol.config import to_toml
from protocol.errors import ConfigError

MAY_CHANGE_AT_RESUME = {"endpoint", "keys", "insecure", "run_dir", "server", "learner.steps",
                        "learner.checkpoint_every", "learner.keep_last", "learner.keep_best",
                        "learner.export_model", "learner.trackers", "learner.dashboard_port",
                        "learner.connect_timeout_s", "learner.group_deadline_s", "learner.push", "learner.parity",
                        "learner.cpu_cores", "learner.micro_batch_tokens", "learner.reward.timeout_s",
                        "learner.reward.num_workers", "learner.reference.device"}  # fmt: skip
"""Keys that do not change what is learned, so a run may go on with other values."""


LEFT_BY_A_FAILED_START = {".lock", "logs", "run_id", "run_id.tmp", "config.toml.tmp", "ledger.db", "ledger.db-shm",
                          "ledger.db-wal", "metrics.jsonl", "samples.jsonl", "tensorboard"}  # fmt: skip
"""What a start that ended before its first group leaves behind; the next start goes over it."""


class RunDir:
    """An opened run directory, locked against a second learner until the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.ledger = path / "ledger.db"
        self.tensorboard = path / "tensorboard"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            raise ConfigError(f"run_dir = {path} cannot be written: {error}; choose another with --run-dir") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ConfigError(
                f"another learner is writing into {path}; wait for it or choose another run_dir"
            ) from error

    def begin(self, run: LearnerRun) -> None:
        """Store the resolved config: from now on the directory holds a run, which only a resume may touch."""
        replace_file(self.config, to_toml(run).encode())

    def close(self) -> None:
        """Let another learner write here."""
        self._lock.close()

    @property
    def run_id(self) -> str:
        """This run's name on the wire: the directory's, and a part that no other run on any machine has."""
        path = self.path / "run_id"
        if not path.exists():
            replace_file(path, f"{self.path.name}-{uuid.uuid4().hex[:8]}".encode())
        return path.read_text()

    @staticmethod
    def checkpoints_of(path: str | Path) -> Path:
        """Where checkpoints are; a rank that does not own the directory needs to know only this."""
        return Path(path) / "checkpoints"


def open_run_dir(run: LearnerRun, *, resume: bool) -> RunDir:
    """Create the directory, or reopen it for the same config. Raises ConfigError."""
    path = Path(run.run_dir)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run_dir = {path} is a file; choose a directory")
    exists = (path / "config.toml").exists()
    if exists and not resume:
        raise ConfigError(
            f"{path} already holds a run; go on with it by --resume, or choose another directory with --run-dir"
        )
    if not exists and path.exists() and {entry.name for entry in path.iterdir()} - LEFT_BY_A_FAILED_START:
        raise ConfigError(f"{path} is not empty and holds no run; choose another directory with --run-dir")
    if not exists and resume:
        raise ConfigError(f"{path} holds no run to resume; leave --resume out, or point --run-dir at the run")
    if exists:
        _refuse_other_config(path / "config.toml", run)
    return RunDir(path)


def _refuse_other_config(path: Path, run: LearnerRun) -> None:
    before, now = _flat(tomllib.loads(path.read_text())), _flat(tomllib.loads(to_toml(run)))
    changed = [
        key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key) and not _may_change(key)
    ]
    if changed:
        differences = "; ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in changed)
        raise ConfigError(
            f"{path.parent} belongs to another config: {differences}. Restore these values to resume it, or choose another run_dir"
        )


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_CHANGE_AT_RESUME)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
