"""The result file of the learning benchmark: one JSON line per cell, appended when the cell ends.

A stopped benchmark continues with the missing cells. Invariant: a complete line is a finished cell. A line truncated by
a kill is ignored, and its cell runs again.
"""

import os
from pathlib import Path

import msgspec

from protocol.errors import ConfigError
from tests.bench.cell import Cell
from tests.bench.trial import Trial

RESULTS_FILE = "cells.jsonl"


def append(directory: Path, trial: Trial) -> None:
    """Append a finished cell durably."""
    path = directory / RESULTS_FILE
    with path.open("a+b") as file:
        if file.tell() and not _ends_with_newline(path):
            file.write(b"\n")
        file.write(msgspec.json.encode(trial) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path) -> dict[Cell, Trial]:
    """Return the finished cells. Raises ConfigError if a cell was run with settings that have changed since."""
    path = directory / RESULTS_FILE
    trials: dict[Cell, Trial] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            trial = msgspec.json.decode(line, type=Trial)
        except msgspec.DecodeError:
            continue  # truncated by a kill
        if trial.settings_hash != trial.cell.settings_hash:
            raise ConfigError(
                f"{path} holds {trial.cell.name} of other settings ({trial.settings_hash}, now "
                f"{trial.cell.settings_hash}); give another directory with --out, or remove the file"
            )
        trials[trial.cell] = trial
    return trials


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
