"""The curves of a chart: values of one metric, reduced to what a page can hold.

    metrics ─▶ series: finite values ─▶ make_series: moving mean, reduction, six digits ─▶ charts.py

Invariant: every point is a recorded value at its own step. A reduction keeps the extremes.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

Metrics = Sequence[dict[str, float]]
Kind = Literal["line", "points", "area", "bars"]

MAX_POINTS = 1000
"""Maximum number of points of a curve."""
MAX_AREA_POINTS = 300


class Curve(msgspec.Struct, frozen=True):
    """A curve that a chart shows if the run has its metric."""

    metric: str
    name: str
    color: str
    """Name of a CSS variable of the page."""
    kind: Kind = "line"
    """"line": values, pale, and their moving mean. "points": values of a metric that few steps have."""


class Series(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A curve with its values, as charts.js reads it."""

    name: str
    color: str
    kind: Kind
    x: list[float]
    y: list[float]
    mean: list[float] | None = None
    """Moving mean at each x."""
    low: list[float] | None = None
    """Lower end of the interval at each x, with `high`."""
    high: list[float] | None = None
    rest: str | None = None
    """Text of the legend at rest. None: the newest value, or its moving mean."""


def series(metrics: Metrics, name: str, against: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the finite values of a metric, with the step or second of each.

    Later lines repeat the reward of an evaluation. The result has it once, at the step of the evaluation.
    """
    evaluated = re.sub(r"reward(/low|/high)?$", "step", name)
    if name.startswith("evaluation/") and evaluated != name:
        first = {
            line[evaluated]: {**line, "step": line[evaluated]}
            for line in reversed(metrics)
            if line.get(evaluated) is not None
        }
        metrics = [first[step] for step in sorted(first)]
    pairs = [
        (line[against], line[name]) for line in metrics if line.get(name) is not None and line.get(against) is not None
    ]
    table = np.array(pairs, dtype=float).reshape(-1, 2)
    table = table[np.isfinite(table).all(axis=1)]
    return table[:, 0], table[:, 1]


def make_series(curve: Curve, x: np.ndarray, y: np.ndarray, log: bool = False, breaks: Sequence[float] = ()) -> Series:
    """Return a curve with its values. The moving mean does not cross `breaks`."""
    kind: Kind = "points" if curve.kind == "line" and len(x) == 1 else curve.kind
    mean = None
    if kind in ("line", "area"):
        parts = np.split(y, np.searchsorted(x, breaks))
        mean = np.concatenate([moving_mean(part, log) for part in parts])
    kept = evenly(len(x), MAX_AREA_POINTS) if kind == "area" else extremes(y)
    for values in (y, mean):
        kept = kept if values is None else kept[np.isfinite(values[kept])]  # JSON has no NaN and no inf
    return Series(
        name=curve.name,
        color=curve.color,
        kind=kind,
        x=x[kept].tolist(),
        y=rounded(y[kept]),
        mean=None if mean is None else rounded(mean[kept]),
    )


def moving_mean(values: np.ndarray, log: bool) -> np.ndarray:
    """Return the centered mean over about a twentieth of the run.

    The window is cut off at the ends. The mean is geometric on a log axis.
    """
    window = min(len(values), max(1, len(values) // 20)) | 1
    half = window // 2
    heights = np.log(values) if log else values
    # A window is the end of one block and the start of the next. A difference of two sums would cancel: after a
    # spike of 1e18, values of 1.0 would be lost.
    padded = np.pad(heights / window, (half, half + -(len(values) + 2 * half) % window)).reshape(-1, window)
    from_start = np.cumsum(padded, axis=1).ravel()
    to_end = np.cumsum(padded[:, ::-1], axis=1)[:, ::-1].ravel()
    first = np.arange(len(values))
    sums = from_start[first + window - 1] + np.where(first % window == 0, 0.0, to_end[first])
    counts = np.minimum(first + half + 1, len(values)) - np.maximum(first - half, 0)
    means = sums * (window / counts)
    return np.exp(means) if log else means


def extremes(y: np.ndarray) -> np.ndarray:
    """Return the indices to keep: all, or the lowest and highest point of each bin, and both ends."""
    if len(y) <= MAX_POINTS:
        return np.arange(len(y))
    bins = np.array_split(np.arange(len(y)), MAX_POINTS // 2 - 1)
    picks = [pick for members in bins for pick in (members[y[members].argmin()], members[y[members].argmax()])]
    return np.unique([0, *picks, len(y) - 1])


def evenly(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def rounded(values: Iterable[float]) -> list[float]:
    """Return the values with six digits."""
    return [float(f"{value:.6g}") for value in values]
