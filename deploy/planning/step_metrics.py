"""Steps of a run, read from its metrics.jsonl for the planner.

Invariant: each step counts once, and only the seconds of steps that stayed.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError
from protocol.former_keys import current_metrics

Lines = Sequence[dict[str, Any]]
"""Metrics of steps, in order."""


def read_steps(path: Path) -> Lines:
    """Return each step once, with the metrics of its last line.

    A resume undoes steps, but `elapsed_s` continues after them, so their seconds are subtracted.

    Raises:
        ConfigError: If a line other than a torn last line is not a step.
        OSError: If the file cannot be read.
    """
    of_step: dict[int, dict[str, Any]] = {}
    undone_s, newest, newest_s = 0.0, 0, 0.0
    for line in _parsed(path):
        step, elapsed_s = line["step"], line["elapsed_s"]
        if step <= newest and elapsed_s > newest_s:  # with equal seconds, it is the same step with more metrics
            of_step = {kept: of_step[kept] for kept in of_step if kept < step}
            undone_s = newest_s - (of_step[max(of_step)]["elapsed_s"] if of_step else 0.0)
        of_step[step] = current_metrics(line) | {"elapsed_s": elapsed_s - undone_s}
        newest, newest_s = step, elapsed_s
    return list(of_step.values())


def mean(lines: Lines, metric: str) -> float:
    return statistics.fmean(values(lines, metric))


def values(lines: Lines, metric: str) -> list[float]:
    """Return the values of a metric. Raises ConfigError if a line does not have the metric, or has null."""
    try:
        found = [line[metric] for line in lines]
    except KeyError as error:
        raise ConfigError(
            f"metrics.jsonl is missing the metric {metric}, which the learner writes in every step; measure another run"
        ) from error
    if None in found:
        raise ConfigError(
            f"{metric} = null (NaN or inf) in step {lines[found.index(None)]['step']} of metrics.jsonl; expected a "
            "number. Measure another run"
        )
    return found


def synced_lines(lines: Lines) -> Lines:
    """Return the lines with weight-sync metrics.

    With overlap, a step may end before its weight sync.

    Raises:
        ConfigError: If there is no such line.
    """
    if pushed := [line for line in lines if "weight_sync/seconds" in line]:
        return pushed
    raise ConfigError(
        f"metrics.jsonl has no weight sync (weight_sync/seconds) in its last {len(lines)} steps; expected at least "
        "one. Measure a longer run"
    )


def _parsed(path: Path) -> list[dict[str, Any]]:
    raw_lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    parsed = []
    for number, raw in enumerate(raw_lines, start=1):
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
            parsed.append(line | {"step": int(line["step"]), "elapsed_s": float(line["elapsed_s"])})
        except (ValueError, TypeError, LookupError) as error:
            if number == len(raw_lines):  # torn by a kill or a full disk
                break
            raise ConfigError(
                f"{path}, line {number}: expected a JSON object with step and elapsed_s, found {raw[:60]!r}. "
                "Remove or repair that line"
            ) from error
    return parsed
