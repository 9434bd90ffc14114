"""Run directory: its lock, the paths of its files, and the checks before a resume.

A run never overwrites another. An existing run is resumed with --resume and the same config, except for keys
that may change (protocol/config_keys.py), or refused. The data is recorded as one digest per prompt: the ledger
refers to prompts by number, so changed data would attribute its groups to other prompts.
"""

import fcntl
import logging
import math
import os
import tomllib
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import NODEFAULT, Struct, to_builtins
from msgspec.structs import FieldInfo, replace

from learner.config import KlConfig, LearnerRun, LossConfig
from learner.config.objectives import is_plug_in
from learner.prompts.prompts import Prompts
from learner.storage.checkpoint import find_checkpoint
from learner.storage.checkpoint_dir import OWNER_FILE, claim
from learner.storage.files import JsonLinesFile, network_file_system, replace_file, whole_lines
from protocol.config import read_toml, to_toml
from protocol.config_keys import flatten, keys_of, may_change
from protocol.console import counted
from protocol.errors import ConfigError, DataError

log = logging.getLogger(__name__)
DUAL_CLIP = "learner.loss.dual_clip"
"""Key that every config.toml spells out. A file without it is from a version without a bound by default."""
STARTS = "configs.jsonl"
LEFT_BY_A_FAILED_START = {".lock", "checkpoints", "logs", "run_id", "config.toml", "ledger.db", "ledger.db-shm",
                          "ledger.db-wal", "metrics.jsonl", "samples.jsonl", "timeline.jsonl", "data.digests",
                          STARTS, "evaluations.jsonl", "evaluation.partial.jsonl", "tensorboard", "wandb",
                          "servers.txt", "keys"}  # fmt: skip
"""Files of a start that ended before its first group; they do not block the next start, nor do their .tmp files."""


class Start(Struct, frozen=True, kw_only=True):
    """A line of configs.jsonl: a start of the learner."""

    step: int
    """Step after which the learner started. 0: a new run."""
    config: str
    """Contents of config.toml."""


class RunDir:
    """Opened run directory, locked against a second learner until the process ends."""

    def __init__(self, path: Path, run: LearnerRun, changes: Sequence[str] = ()) -> None:
        self.path, self.run = path, run
        self.changes = changes
        """What this resume changes in the config, such as `learner.steps = 200, was 100`."""
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.timeline = path / "timeline.jsonl"
        self.ledger = path / "ledger.db"
        self.data_digests = path / "data.digests"
        self.tensorboard = path / "tensorboard"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            raise ConfigError(f"run_dir = {path} cannot be written: {error}; choose another with --run-dir") from error
        if kind := network_file_system(path):
            log.warning(
                "run_dir = %s is on a network file system (%s), which slows down every group and may damage the "
                "ledger, a SQLite file with a write-ahead log, when this machine or its network fails. Put run_dir "
                "on a local disk (--run-dir); checkpoints may be elsewhere (learner.checkpoint.dir)",
                path, kind,
            )  # fmt: skip
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ConfigError(
                f"another learner is writing to {path}; wait for it to finish, or choose another run_dir"
            ) from error
        # A lock lasts as long as any process has the file, and a killed learner's children may outlive it.
        os.register_at_fork(after_in_child=self._lock.close)

    def begin(self, step: int = 0) -> None:
        """Store the config of the steps after `step`; from then on, only a resume may use the directory."""
        config = to_toml(_with_dual_clip(self.run))
        starts = JsonLinesFile(self.path / STARTS)
        try:
            starts.append({"step": step, "config": config})
        finally:
            starts.close()
        replace_file(self.config, config.encode())

    @property
    def has_started(self) -> bool:
        """True if the directory holds a run. Before `begin`, this means a resume."""
        return self.config.exists()

    def close(self) -> None:
        """Release the lock, so that another learner may use the directory."""
        self._lock.close()

    @property
    def run_id(self) -> str:
        """Name of the run on the wire: the directory's name and a globally unique suffix."""
        path = self.path / "run_id"
        if not path.exists():
            replace_file(path, f"{self.path.name}-{uuid.uuid4().hex[:8]}".encode())
        return path.read_text("utf-8")


def open_run_dir(run: LearnerRun, *, resume: bool) -> RunDir:
    """Create the directory, or reopen it for the same config.

    Raises:
        ConfigError: The directory is unusable, or belongs to another run or config.
    """
    path = Path(run.run_dir)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run_dir = {path} is a file; choose a directory")
    if not resume:
        run.require_new_run_dir()
    exists = (path / "config.toml").exists()
    if not exists and path.exists() and _foreign_names(path, run.checkpoint_dir):
        raise ConfigError(f"{path} is not empty and contains no run; choose another directory with --run-dir")
    if not exists and resume:
        raise ConfigError(f"{path} contains no run to resume; omit --resume, or set --run-dir to the run's directory")
    run_dir = RunDir(path, run, _changes_since(path / "config.toml", run) if exists else ())
    try:
        claim(run.checkpoint_dir, run_dir.run_id, may_have_checkpoints=exists)
    except ConfigError:
        run_dir.close()
        raise
    return run_dir


def _foreign_names(path: Path, checkpoint_dir: Path) -> set[str]:
    """Return the names in the directory that no failed start of this run leaves there."""
    directory, checkpoints = path.resolve(), checkpoint_dir.resolve()
    own = checkpoints.relative_to(directory).parts[:1] if checkpoints.is_relative_to(directory) else ()
    return {entry.name.removesuffix(".tmp") for entry in path.iterdir()} - LEFT_BY_A_FAILED_START - {*own}


def starts_before(path: Path, step: int) -> list[Start]:
    """Return the starts of the learner whose steps, up to `step`, were not run again later. None: they are unknown.

    A run of an earlier version has no such file.
    """
    file, starts = path / STARTS, list[Start]()
    if not file.is_file():
        return starts
    for line in file.read_bytes()[: whole_lines(file)].splitlines():
        start = msgspec.json.decode(line, type=Start)
        if start.step < step:
            starts = [*(one for one in starts if one.step < start.step), start]
    return starts


def _changes_since(path: Path, run: LearnerRun) -> list[str]:
    """Return and log the changes from the run's earlier config.

    Raises:
        ConfigError: A resume may not change one of the keys, or the checkpoints are elsewhere or missing.
    """
    before = flatten(read_toml(path)[0])
    now, keys = flatten(tomllib.loads(to_toml(_with_dual_clip(run)))), keys_of(LearnerRun)
    for config in (before, now):
        _settle_defaults(config)
    if DUAL_CLIP in now:
        before.setdefault(DUAL_CLIP, math.inf)
    refused, changes = [], []
    for key in sorted(before.keys() | now.keys()):
        known = _field(keys, key)
        was, value = before.get(key, _default(known)), now.get(key)
        if was == value:
            continue
        if known is not None and may_change(known):
            changes.append(f"{key} = {value}, was {was}")
        else:
            refused.append(f"{key} was {was!r}, is {value!r}" if known else f"{key} was {was!r}, is no longer a key")
    if refused:
        raise ConfigError(
            f"{path.parent} contains a run with another config: {'; '.join(refused)}. Restore these values to resume "
            "it, or choose another run_dir"
        )
    for change in changes:
        log.info("resumed with %s", change)
    former = Path(before.get("learner.checkpoint.dir") or path.parent / "checkpoints")
    _require_checkpoints(run.checkpoint_dir, former, has_ledger=(path.parent / "ledger.db").exists())
    return changes


def _require_checkpoints(directory: Path, former: Path, *, has_ledger: bool) -> None:
    """Raise ConfigError if the run would start again from step 0 although it may have checkpoints."""
    if find_checkpoint(directory) is not None:
        return
    if find_checkpoint(former) is not None:
        raise ConfigError(
            f"learner.checkpoint.dir: {directory} has no checkpoint of this run, and {former}, where it wrote them "
            "before, has; move that directory there, or set learner.checkpoint.dir to it"
        )
    # A run that was killed before its first checkpoint has claimed the directory.
    if has_ledger and not any((folder / OWNER_FILE).exists() for folder in (directory, former)):
        raise ConfigError(
            f"learner.checkpoint.dir: {former}, where this run wrote its checkpoints, is missing or empty; mount or "
            "restore it, or start a new run in another run_dir"
        )


def _with_dual_clip(run: LearnerRun) -> LearnerRun:
    """Return the run with dual_clip spelled out, if its objective uses that bound."""
    loss = run.learner.loss
    if "dual_clip" in loss.unmet_needs() or is_plug_in(loss.objective):
        return run
    loss = replace(loss, dual_clip=loss.value("dual_clip"))
    return replace(run, learner=replace(run.learner, loss=loss))


def _settle_defaults(config: dict[str, Any]) -> None:
    """Fill in defaults that depend on other keys.

    The config.toml of an earlier version spells them out.
    """
    objective = config.get("learner.loss.objective", LossConfig().objective)
    config.setdefault("learner.loss.normalization", LossConfig(objective=objective).mean_over)
    place = config.get("learner.kl.place", KlConfig().place)
    config.setdefault("learner.kl.estimator", KlConfig(place=place).estimator_used)


def _field(keys: dict[str, FieldInfo], name: str) -> FieldInfo | None:
    """Return the field of a key, or of the table that contains it."""
    while name not in keys and "." in name:
        name = name.rpartition(".")[0]
    return keys.get(name)


def _default(field: FieldInfo | None) -> Any:
    """Return the value of a key that config.toml omits: it is unset, or newer."""
    if field is None or field.default is NODEFAULT:
        return None
    value = to_builtins(field.default)
    return list(value) if isinstance(value, tuple) else value  # as TOML returns it


def record_data(path: Path, prompts: Prompts) -> None:
    """Store the digests of a new run's prompts, 8 bytes each. Raises DiskError."""
    replace_file(path, prompts.digests.astype("<i8").tobytes())


def check_data(path: Path, prompts: Prompts) -> None:
    """Raise DataError, naming the first difference, if the data is not the run's."""
    if not path.exists():
        log.warning("cannot check that the data is the same as at the start of the run (%s is missing)", path)
        return
    before, now = np.frombuffer(path.read_bytes(), "<i8"), prompts.digests
    if np.array_equal(before, now):
        return
    num_common = min(len(before), len(now))
    changed = np.flatnonzero(before[:num_common] != now[:num_common])
    if len(changed):
        change = (
            f"row {prompts.row(int(changed[0]))} is the first changed row (its prompt, its columns, or its token ids)"
        )
        remedy = "Restore the data, the chat template and the tokenizer (learner.data.revision pins a hub dataset)"
    elif len(now) > len(before):
        change = (
            f"{counted(len(now) - len(before), 'new prompt')} after the original {len(before)}, which would change the "
            "order of all prompts"
        )
        remedy = f"Exclude them with learner.data.num_prompts = {prompts.row(len(before) - 1) + 1}"
    else:
        change = f"{len(before) - len(now)} of its {len(before)} prompts are missing at the end"
        remedy = "Restore the data"
    raise DataError(
        f"{prompts.name} has changed since the run in {path.parent} started: {change}. {remedy}, or start a new run "
        "with --run-dir"
    )
