"""The file the learning benchmark writes its cells into: one JSON line each, appended as the cell ends.

A benchmark that is stopped goes on where it was. Invariant: a line that is complete is a finished cell; one cut off by a
kill is left out, and its cell is run again.
"""

import os
from pathlib import Path

import msgspec

from protocol.errors import ConfigError
from tests.bench.cell import Cell
from tests.bench.trial import Trial

RESULTS_FILE = "cells.jsonl"


def append(directory: Path, trial: Trial) -> None:
    """Add a finished cell, durably."""
    path = directory / RESULTS_FILE
    with path.open("a+b") as file:
        if file.tell() and not _ends_with_newline(path):
            file.write(b"\n")
        file.write(msgspec.json.encode(trial) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(directory: Path) -> dict[Cell, Trial]:
    """Return the finished cells. Raises ConfigError if one was run with other settings than a cell of its name has now."""
    path = directory / RESULTS_FILE
    trials: dict[Cell, Trial] = {}
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            trial = msgspec.json.decode(line, type=Trial)
        except msgspec.DecodeError:
            continue  # cut off by a kill
        if trial.settings_hash != trial.cell.settings_hash:
            raise ConfigError(
                f"{path} holds {trial.cell.name} of other settings ({trial.settings_hash}, now {trial.cell.settings_hash}); "
                "give another directory with --out, or remove the file"
            )
        trials[trial.cell] = trial
    return trials


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
