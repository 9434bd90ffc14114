"""The charts of the run report, with their titles and captions.

    summary.read_metrics ─▶ draw_charts, with drawing.py ─▶ the template of page.py

Invariant: a chart without data is not drawn but named, with the reason.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from learner.report.drawing import (
    AMBER,
    BLUE,
    COLOURS,
    GREY,
    INK,
    NICE,
    ROSE,
    TEAL,
    VARIABLE_OF,
    VIOLET,
    Curve,
    Format,
    canvas,
    draw_curve,
    duration,
    label_ends,
    moving_mean,
    percent,
    plain,
    room_for,
    series,
    set_limits,
    step_ticks,
    svg_of,
    time_unit,
    tiny,
)

log = logging.getLogger(__name__)

Metrics = Sequence[dict[str, float]]
MAX_MARKS = 60  # with more refreshes than this, only their number is shown


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    told: str
    """Caption: one sentence on how to read the chart."""
    svg: str
    legend: list[tuple[str, str]] = []
    """(CSS color, label) pairs, where labels at the curves would not fit."""


class Absent(msgspec.Struct, frozen=True):
    """A chart that has no data, and the reason."""

    title: str
    reason: str


class Axes(NamedTuple):
    """Format and axes of a chart of curves."""

    fmt: Format = plain
    """Format of the values."""
    over_time: bool = False
    """Whether x is seconds instead of steps."""
    log: bool = False


PLAIN = Axes()
REST = "time/rest"
"""Time that no named part of a step covers."""


def draw_charts(metrics: Metrics, staleness_histogram: dict[int, int]) -> list[Chart | Absent]:
    """Draw every chart of the report, in reading order."""
    reward = [Curve("reward/mean", "mean", BLUE), Curve("reward/exact_match", "exact", AMBER)]
    server_cost = [Curve("push/seconds", "push", GREY), Curve("push/stall_seconds", "stall", BLUE)]
    idle = [Curve("perf/learner_idle_frac", "learner", BLUE), Curve("perf/server_idle_frac", "server", AMBER)]
    mismatch = [
        Curve("policy/mismatch_abs_logprob", "fresh", BLUE),
        Curve("parity/abs_logprob", "probe", AMBER, dots=True),
    ]
    charts = [
        curves(
            "Reward per step",
            "Pale: each step; strong: moving mean.",
            metrics,
            reward,
        ),
        curves(
            "Reward over time",
            "The same against the clock, from the start of the run.",
            metrics,
            reward,
            Axes(over_time=True),
        ),
        *reward_functions(metrics),
        staleness(staleness_histogram),
        kl(metrics),
        curves(
            "Entropy of the policy",
            "Near 0 the policy no longer explores.",
            metrics,
            [Curve("policy/entropy", "", BLUE)],
        ),
        curves(
            "Tokens held by the clip",
            "Share whose ratio left the trusted range.",
            metrics,
            [Curve("loss/clipped_frac", "", BLUE)],
            Axes(percent),
        ),
        curves("Gradient norm", "Before clipping.", metrics, [Curve("optim/grad_norm", "", BLUE)]),
        curves(
            "Length of completions",
            "Mean number of tokens.",
            metrics,
            [Curve("rollout/completion_length_mean", "", BLUE)],
        ),
        curves(
            "Cut off",
            "Share of completions that ended at learner.sampling.max_tokens.",
            metrics,
            [Curve("rollout/truncated_frac", "", BLUE)],
            Axes(percent),
        ),
        curves("Spread of rewards", "Standard deviation within a step.", metrics, [Curve("reward/std", "", BLUE)]),
        curves("Loss", "What the optimizer minimises.", metrics, [Curve("loss/policy", "", BLUE)]),
        curves("Learning rate", "Of each step.", metrics, [Curve("optim/lr", "", BLUE)], Axes(tiny)),
        time_split(metrics),
        curves("Who waited", "Share of the time in which each side had nothing to do.", metrics, idle, Axes(percent)),
        curves(
            "What a push costs",
            "The whole transfer, and the stall: how long it stopped generation.",
            metrics,
            server_cost,
            Axes(duration),
        ),
        curves(
            "Server against learner",
            "Mean |Δ logprob| under the same weights: fresh tokens, and the probe.",
            metrics,
            mismatch,
            Axes(tiny, log=True),
        ),
    ]
    return charts


# ---- kinds of charts
def curves(
    title: str,
    told: str,
    metrics: Metrics,
    wanted: list[Curve],
    axes_are: Axes = PLAIN,
) -> Chart | Absent:
    against = "elapsed_s" if axes_are.over_time else "step"
    found = [(curve, *series(metrics, curve.metric, against)) for curve in wanted]
    return drawn(title, told, found, axes_are)


def drawn(
    title: str, told: str, found: Sequence[tuple[Curve, np.ndarray, np.ndarray]], axes_are: Axes = PLAIN
) -> Chart | Absent:
    """Draw curves, each with its values against steps or seconds."""
    fmt, over_time, log = axes_are
    names = sorted({curve.metric for curve, _, _ in found})
    found = [(curve, x, y) for curve, x, y in found if len(y) and not (log and y.max() <= 0)]
    if not found:
        return Absent(title, f"the run recorded no {' and no '.join(names)}")
    unit, scale = time_unit(found[0][1][-1]) if over_time else ("step", 1.0)
    if log:
        found = [(curve, x, np.maximum(y, y[y > 0].min())) for curve, x, y in found]
    lasts = [(curve, curve.end(y, log)) for curve, _, y in found]
    ends = [(last, f"{curve.label} {fmt(last)}".strip(), curve.colour) for curve, last in lasts]
    figure, axes = canvas(right_in=room_for(text for _, text, _ in ends))
    for curve, x, y in found:
        draw_curve(axes, curve, x / scale, y, log)
    set_limits(axes, [y for _, _, y in found], fmt, log)
    axes.set_xlabel(unit)
    label_ends(axes, ends)
    return Chart(title=title, told=told, svg=svg_of(figure, title))


def reward_functions(metrics: Metrics) -> list[Chart | Absent]:
    """Draw each reward function if there are several; a single one is the mean reward."""
    names = sorted({name for line in metrics for name in line if name.startswith("reward/")})
    names = [name for name in names if name not in ("reward/mean", "reward/std", "reward/exact_match")]
    if len(names) < 2:
        return []
    shown = [
        Curve(name, name.removeprefix("reward/")[:14], colour) for name, colour in zip(names, COLOURS, strict=False)
    ]
    more = f" The first {len(shown)} of {len(names)}." if len(names) > len(shown) else ""
    return [curves("Each reward function", f"Mean per step, before weighting.{more}", metrics, shown)]


def staleness(histogram: dict[int, int]) -> Chart | Absent:
    title = "How old the groups were"
    if not histogram:
        return Absent(title, "no group has been consumed yet")
    total = sum(histogram.values())
    figure, axes = canvas(right_in=0.15)
    ages = list(range(min(0, *histogram), max(histogram) + 1))
    counts = [histogram.get(age, 0) for age in ages]
    axes.bar(ages, counts, width=0.72, color=BLUE, alpha=0.85, linewidth=0)
    if len(ages) <= 12:
        for age, count in zip(ages, counts, strict=True):
            share = percent(count / total) if count else "0"
            axes.annotate(share, (age, count), (0, 4), textcoords="offset points", ha="center", color=INK, fontsize=8.5)
    axes.set_ylim(0, max(counts) * 1.16)
    axes.set_xlim(ages[0] - 0.6, max(ages[-1], 2) + 0.6)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    axes.set_xlabel("policy versions between sampling and training")
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return Chart(
        title=title,
        told="Groups by staleness when they were trained on; 0 would be synchronous.",
        svg=svg_of(figure, title),
    )


def kl(metrics: Metrics) -> Chart | Absent:
    title = "Distance to the reference"
    steps, values = series(metrics, "reference/kl", "step")
    if not len(values):
        return Absent(
            title, "the run recorded no reference/kl (learner.reference may be none, or the KL coefficient 0)"
        )
    version_steps, versions = series(metrics, "reference/version", "step")
    refreshes = version_steps[1:][np.diff(versions) != 0]
    marked = refreshes if len(refreshes) <= MAX_MARKS else refreshes[:0]
    # A mean across a refresh would blur the drop.
    parts = np.split(np.arange(len(steps)), np.searchsorted(steps, marked))
    parts = [part for part in parts if len(part)]
    last = float(moving_mean(values[parts[-1]], False)[-1])
    figure, axes = canvas(right_in=room_for([plain(last)]))
    for step in marked:
        axes.axvline(step, color=AMBER, linewidth=1.0, linestyle=(0, (2, 2)), alpha=0.9)
    for part in parts:
        draw_curve(axes, Curve("reference/kl", "", BLUE), steps[part], values[part], False)
    set_limits(axes, [values], plain, False)
    axes.set_xlabel("step")
    label_ends(axes, [(last, plain(last), BLUE)])
    legend = [(VARIABLE_OF[AMBER], f"reference refreshed ({len(refreshes)}×)")] if len(refreshes) else []
    return Chart(title=title, told="KL of the policy to its reference.", svg=svg_of(figure, title), legend=legend)


def _rest(line: Mapping[str, float], known: Sequence[str]) -> float:
    return max(0.0, line["time/step"] - sum(line.get(name) or 0.0 for name in known))


def time_split(metrics: Metrics) -> Chart | Absent:
    """Draw the parts of a step, stacked to the height of the whole step."""
    title = "Where a step's time goes"
    parts = [
        ("time/wait_for_batch", "waiting for groups", AMBER),
        ("time/reference", "reference", ROSE),
        ("time/forward_backward", "forward and backward", BLUE),
        ("time/optimizer", "optimizer", VIOLET),
        ("time/push", "push", TEAL),
        (REST, "batches, parity, other", GREY),
    ]
    known = [name for name, _, _ in parts if name != REST]
    metrics = [{**line, REST: _rest(line, known)} if "time/step" in line else line for line in metrics]
    present = [part for part in parts if len(series(metrics, part[0], "step")[1])]
    if not present:
        return Absent(title, "the run recorded no time/…")
    steps = np.array([float(line["step"]) for line in metrics])
    raw = [np.array([float(line.get(name) or 0.0) for line in metrics]) for name, _, _ in present]
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 300)).astype(int))
    heights = [moving_mean(np.nan_to_num(seconds), False)[kept] for seconds in raw]
    figure, axes = canvas(right_in=0.15)
    if len(kept) == 1:
        steps, heights = np.array([steps[0] - 0.5, steps[0] + 0.5]), [np.repeat(height, 2) for height in heights]
        kept = np.array([0, 1])
    axes.stackplot(steps[kept], heights, colors=[colour for _, _, colour in present], alpha=0.82, linewidth=0)
    axes.set_xlim(steps[kept][0], steps[kept][-1])
    axes.set_ylim(0, max(float(np.sum(heights, axis=0).max()) * 1.08, 1e-9))
    axes.xaxis.set_major_locator(step_ticks())
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=NICE))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value)))
    axes.set_xlabel("step")
    total = sum(float(np.nanmean(seconds)) for seconds in raw) or 1.0
    legend = [
        (VARIABLE_OF[colour], f"{label} {percent(float(np.nanmean(seconds)) / total)}")
        for (_, label, colour), seconds in zip(present, raw, strict=True)
    ]
    return Chart(
        title=title, told="Seconds of the learner per step, moving mean.", svg=svg_of(figure, title), legend=legend
    )
