"""Metrics of a run's steps, as the planner reads them: a missing value is an error."""

import statistics
from collections.abc import Sequence
from typing import Any

from protocol.errors import ConfigError

Lines = Sequence[dict[str, Any]]
"""Metrics of steps, in order."""


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
        ConfigError: There is no such line.
    """
    if pushed := [line for line in lines if "weight_sync/seconds" in line]:
        return pushed
    raise ConfigError(
        f"metrics.jsonl has no weight sync (weight_sync/seconds) in its last {len(lines)} steps; expected at least "
        "one. Measure a longer run"
    )
