"""Plots of the learning benchmark: learning curves, and results by staleness."""

import statistics
from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.bench.cell import ALGORITHMS, LARGE_STEPS, REFERENCES, STALENESSES, Cell
from tests.bench.summary import table
from tests.bench.trial import Trial

COLORS = {name: f"C{i}" for names in (ALGORITHMS, REFERENCES) for i, name in enumerate(names)}
"""Fixed colors, independent of which cells exist."""


def write_plots(trials: dict[Cell, Trial], directory: Path) -> list[Path]:
    """Write PNGs for every task with cells at every staleness. Return their paths."""
    paths = []
    for task in sorted({cell.task for cell in trials} - {LARGE_STEPS}):
        mine = {cell: trial for cell, trial in trials.items() if cell.task == task}
        for name, figure in (
            ("staleness", _staleness(mine)),
            ("curves", _curves(mine)),
            ("references", _references(mine)),
        ):
            figure.suptitle(f"{task}: {name}")
            paths.append(directory / f"{task}-{name}.png")
            figure.savefig(paths[-1], dpi=120)
    return paths


def _staleness(trials: dict[Cell, Trial]) -> Figure:
    """Plot the best exact match by staleness: one line per algorithm, mean and deviation over seeds."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in table(trials) if row["reference"] == "none"]
    for algorithm in ALGORITHMS:
        points = [row for row in rows if row["algorithm"] == algorithm]
        if points:
            axes.errorbar(
                [row["max_staleness"] for row in points], [row["best_mean"] for row in points],
                yerr=[row["best_std"] or 0.0 for row in points], marker="o", capsize=3, label=algorithm,
                color=COLORS[algorithm],
            )  # fmt: skip
    _finish(axes, "staleness", "best exact match")
    return figure


def _curves(trials: dict[Cell, Trial]) -> Figure:
    """Plot the mean exact match by step, one panel per staleness."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, len(STALENESSES), sharey=True)
    for axes, staleness in zip(panels, STALENESSES, strict=True):
        for algorithm in ALGORITHMS:
            chosen = [
                trial for cell, trial in trials.items()
                if (cell.algorithm, cell.max_staleness, cell.reference) == (algorithm, staleness, "none")
            ]  # fmt: skip
            _draw_mean_curve(axes, chosen, algorithm)
        axes.set_title(f"staleness {staleness}")
        _finish(axes, "step", "exact match" if staleness == STALENESSES[0] else "")
    return figure


def _references(trials: dict[Cell, Trial]) -> Figure:
    """Plot the mean exact match of grpo at staleness 4 by step, one line per reference."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for reference in REFERENCES:
        chosen = [
            trial for cell, trial in trials.items()
            if (cell.algorithm, cell.max_staleness, cell.reference) == ("grpo", 4, reference)
        ]  # fmt: skip
        _draw_mean_curve(axes, chosen, reference)
    _finish(axes, "step", "exact match")
    return figure


def _draw_mean_curve(axes: Axes, trials: list[Trial], label: str) -> None:
    by_step: dict[int, list[float]] = defaultdict(list)
    for trial in trials:
        for point in trial.curve:
            by_step[point.step].append(point.exact_match)
    if by_step:
        means = [statistics.fmean(values) for values in by_step.values()]
        axes.plot(list(by_step), means, label=label, color=COLORS[label])


def _finish(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
