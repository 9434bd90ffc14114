"""The summary of the learning benchmark: means and deviations over seeds, and the three headline numbers."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tests.bench.cell import LARGE_STEPS, Cell
from tests.bench.trial import Trial

Key = tuple[str, str, int, str]


def summarize(trials: dict[Cell, Trial]) -> dict[str, Any]:
    """Return the JSON object of the benchmark, without the real system. Numbers with missing cells are None."""
    rows = table(trials)
    best = {(row["task"], row["algorithm"], row["max_staleness"], row["reference"]): row["best_mean"] for row in rows}
    tasks = sorted({row["task"] for row in rows} - {LARGE_STEPS})
    differences = {
        task: _difference(best.get((task, "grpo", 4, "none")), best.get((task, "grpo", 0, "none"))) for task in tasks
    }
    return {
        "async_4_minus_sync": differences.get("sort"),
        "async_4_minus_sync_by_task": differences,
        "stale8_clipped": best.get((LARGE_STEPS, "grpo", 8, "none")),
        "stale8_uncorrected": best.get((LARGE_STEPS, "uncorrected", 8, "none")),
        "table": [row for row in rows if row["reference"] == "none"],
        "references": [row for row in rows if row["algorithm"] == "grpo" and row["max_staleness"] == 4],
        "seconds_per_cell": _mean_by(trials, lambda trial: trial.cell.task, lambda trial: trial.seconds),
    }


def table(trials: dict[Cell, Trial]) -> list[dict[str, Any]]:
    """Return one row per kind of cell: final and best exact match as mean, deviation, and by seed."""
    by_kind: dict[Key, list[Trial]] = defaultdict(list)
    for cell, trial in sorted(trials.items(), key=lambda item: item[0].name):
        by_kind[(cell.task, cell.algorithm, cell.max_staleness, cell.reference)].append(trial)
    rows = []
    for (task, algorithm, max_staleness, reference), group in sorted(by_kind.items()):
        row: dict[str, Any] = {
            "task": task, "algorithm": algorithm, "max_staleness": max_staleness, "reference": reference,
            "num_seeds": len(group),
        }  # fmt: skip
        for measure in ("final", "best"):
            values = {str(trial.cell.seed): getattr(trial, measure) for trial in group}
            row[f"{measure}_mean"] = statistics.fmean(values.values())
            row[f"{measure}_std"] = statistics.stdev(values.values()) if len(values) > 1 else None
            row[f"{measure}_by_seed"] = values
        rows.append(row)
    return rows


def as_text(summary: dict[str, Any]) -> str:
    """Format the table."""
    lines = [f"{'task':<11}{'algorithm':<13}{'staleness':<11}{'reference':<11}{'final':<16}{'best':<16}seeds"]
    shown = summary["table"] + [row for row in summary["references"] if row["reference"] != "none"]
    for row in shown:
        numbers = [_format(row[f"{measure}_mean"], row[f"{measure}_std"]) for measure in ("final", "best")]
        lines.append(
            f"{row['task']:<11}{row['algorithm']:<13}{row['max_staleness']:<11}{row['reference']:<11}"
            f"{numbers[0]:<16}{numbers[1]:<16}{row['num_seeds']}"
        )
    headlines = ("async_4_minus_sync", "stale8_clipped", "stale8_uncorrected")
    lines += [f"{name}: {'not run' if summary[name] is None else f'{summary[name]:.3f}'}" for name in headlines]
    return "\n".join(lines)


def _format(mean: float, std: float | None) -> str:
    return f"{mean:.3f}" if std is None else f"{mean:.3f} ± {std:.3f}"


def _difference(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left - right


def _mean_by(
    trials: dict[Cell, Trial], key: Callable[[Trial], str], value: Callable[[Trial], float]
) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for trial in trials.values():
        values[key(trial)].append(value(trial))
    return {name: statistics.fmean(found) for name, found in values.items()}
