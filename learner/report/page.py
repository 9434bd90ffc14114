"""The report of a run, and the comparison of several: one HTML file that needs no network and no other file.

    run directory ─▶ summary.py, records.py ─▶ report.html
    run directories ─▶ summary.py, config.toml ─▶ Comparison ─▶ comparison.html next to the first run
                                                             └▶ console table, or JSON

Nothing in a run changes. Prompts and completions are untrusted text, so the templates escape everything, and the
page's policy forbids loads and all scripts but our own.
"""

import datetime
import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from learner.evaluation.results import Estimate
from learner.report.charts import (
    COLORS,
    PLANS,
    Absent,
    Chart,
    chart_of,
    evaluations_of_run,
    rewards_of_sets,
    run_charts,
)
from learner.report.plans import ChartPlan
from learner.report.records import read_events
from learner.report.sample_view import readable, table_of_run
from learner.report.series import Curve, Metrics
from learner.report.summary import (
    RunDirectoryError,
    Summary,
    aligned,
    duration,
    evaluation_by_label,
    number,
    read_evaluations,
    read_ledger,
    read_metrics,
    summary_of,
)
from learner.report.templates import render_page
from learner.storage.files import replace_file
from protocol.config_keys import flatten
from protocol.former_keys import renamed

COMPARED = ("Reward per step", "Reward over time", "Entropy", "Completion length", "Clipped tokens", "Throughput")
"""Charts of a comparison: of one metric each, the first of its plan. The evaluations follow the rewards."""
EVALUATIONS_INDEX = 2
COMPARED_ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("steps", lambda s: f"{s.steps:,}"),
    ("time", lambda s: duration(s.seconds)),
    ("reward, first tenth", lambda s: number(s.reward_first, ".3f")),
    ("reward, last tenth", lambda s: number(s.reward_last, ".3f")),
    ("exact match", lambda s: number(s.exact_last, ".3f")),
    ("evaluation", lambda s: evaluation_text(s)),
    ("completion tokens/s", lambda s: number(s.completion_tokens_per_s, ",.0f")),
    ("staleness", lambda s: number(s.staleness_mean)),
    ("mismatch", lambda s: number(s.mismatch_mean_abs_logprob, ".1e")),
    ("waits for", lambda s: f"{s.waited_for[0]}, {s.waited_for[1]:.0%}" if s.waited_for else "–"),
    ("groups lost", lambda s: f"{s.groups_lost:,}"),
)
ALWAYS_DIFFERENT = {"run_dir"}
"""Keys that differ between any two runs."""


class Tile(msgspec.Struct, frozen=True):
    label: str
    value: str
    note: str
    good: bool | None = None


class ComparedRun(msgspec.Struct, frozen=True):
    """A run in the comparison."""

    name: str
    path: str
    summary: Summary
    config: dict[str, Any]
    """Values by full key, without the keys that are not set. Infinity is "inf"."""


class Comparison(msgspec.Struct, frozen=True):
    """The compared runs, and the config keys in which they differ.

    Example of `differences`: {"learner.max_staleness": [0, None]}, where None is the default.
    """

    runs: list[ComparedRun]
    differences: dict[str, list[Any]]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run directory atomically and return its path."""
    run_dir = Path(run_dir)
    path = run_dir / "report.html"
    replace_file(path, render(run_dir).encode("utf-8", "replace"))
    return path


def render(run_dir: Path) -> str:
    metrics, ledger = read_metrics(run_dir), read_ledger(run_dir)
    evaluations = read_evaluations(run_dir)
    summary = summary_of(metrics, ledger, evaluations)
    charts = run_charts(metrics, evaluations_of_run(evaluations), ledger.staleness_histogram)
    config_path = run_dir / "config.toml"
    return render_page(
        "report.html.jinja",
        [chart for chart in charts if isinstance(chart, Chart)],
        name=run_dir.resolve().name,
        ended=ended_at(metrics),
        summary=summary,
        tiles=tiles_of(summary),
        counts=ledger.counts,
        absent=[chart for chart in charts if isinstance(chart, Absent)],
        events=[(clock(event.time), readable(event.what)) for event in read_events(run_dir / "timeline.jsonl")],
        duration=duration,
        table=table_of_run(run_dir / "samples.jsonl"),
        config=config_path.read_text("utf-8", "replace") if config_path.is_file() else None,
    )


def tiles_of(s: Summary) -> list[Tile]:
    stall = s.push_stall_median_s
    tiles = [
        Tile("Reward", f"{number(s.reward_first)} → {number(s.reward_last)}", "first and last tenth of the steps"),
        Tile("Exact match", number(s.exact_last), "last tenth of the steps") if s.exact_last is not None else None,
        *(
            Tile(label.capitalize(), number(reward.mean), evaluation_note(reward, s.evaluation_step))
            for label, reward in evaluation_by_label(s).items()
        ),
        Tile("Slowdown", f"{s.training_slowdown:.2f} ×", "of a step during an evaluation")
        if s.training_slowdown
        else None,
        Tile("Steps", f"{s.steps:,}", f"in {duration(s.seconds)}"),
        Tile("Speed", number(s.completion_tokens_per_s, ",.0f"), "completion tokens per second"),
        Tile(
            "Staleness",
            number(s.staleness_mean),
            f"policy versions, at most {number(s.staleness_max, '.0f')}",
        ),
        Tile("Weight sync", "–" if stall is None else f"{1000 * stall:,.0f} ms", "without generation, median"),
        Tile(
            "Mismatch",
            number(s.mismatch_mean_abs_logprob, ".1e"),
            "mean |Δ logprob|; normal in float32: 1e−6, in bfloat16: up to 0.1 (a model of 135M parameters)",
        ),
        Tile("Waited for", s.waited_for[0], f"{s.waited_for[1]:.0%} of the time") if s.waited_for else None,
        Tile("Groups lost", f"{s.groups_lost:,}", f"of {s.groups_admitted:,} admitted", s.groups_lost == 0),
    ]
    return [tile for tile in tiles if tile is not None]


def evaluation_text(s: Summary) -> str:
    """Return the newest evaluation, of each set if there are several, as in `few 0.5, many 0.25, step 6`."""
    of_sets = [f"{name} {reward}" for name, reward in s.evaluated_sets.items()]
    rewards = of_sets or ([str(s.evaluation)] if s.evaluation else [])
    return ", ".join([*rewards, f"step {s.evaluation_step}"]) if rewards else "–"


def evaluation_note(reward: Estimate, step: int | None) -> str:
    after = f"after step {step}"
    if reward.low is None or reward.high is None:
        return after
    return f"{number(reward.low)} to {number(reward.high)}, {after}"


def ended_at(metrics: list[dict[str, float]]) -> str | None:
    seconds = metrics[-1].get("time")
    return None if seconds is None else clock(seconds, "%-d %B %Y, %H:%M UTC")


def clock(seconds: float, spec: str = "%-d %b, %H:%M:%S") -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime(spec)


def compare(run_dirs: Sequence[Path]) -> tuple[Comparison, list[list[dict[str, float]]]]:
    """Return the comparison and the metrics of each run. Raises RunDirectoryError."""
    if len(run_dirs) > len(COLORS):
        raise RunDirectoryError(f"{len(run_dirs)} runs cannot be compared in one report; select at most {len(COLORS)}")
    if twice := {str(path) for path in run_dirs if run_dirs.count(path) > 1}:
        raise RunDirectoryError(f"{', '.join(sorted(twice))} is given more than once; give each run once")
    metrics = [read_metrics(path) for path in run_dirs]
    runs = [
        ComparedRun(name, str(path), summary_of(lines, read_ledger(path), read_evaluations(path)), _config_of(path))
        for name, path, lines in zip(_run_names(run_dirs), run_dirs, metrics, strict=True)
    ]
    keys = sorted({key for run in runs for key in run.config} - ALWAYS_DIFFERENT)
    values = {key: [run.config.get(key) for run in runs] for key in keys}
    differences = {key: shown for key, shown in values.items() if any(one != shown[0] for one in shown)}
    return Comparison(runs, differences), metrics


def write_comparison(comparison: Comparison, metrics: Sequence[Metrics]) -> Path:
    """Write comparison.html next to the first run's directory and return its path."""
    charts = [_comparison_chart(comparison, metrics, plan) for plan in _comparison_plans(metrics)]
    page = render_page(
        "comparison.html.jinja",
        [chart for chart in charts if isinstance(chart, Chart)],
        names=[run.name for run in comparison.runs],
        rows=[(label, [describe(run.summary) for run in comparison.runs]) for label, describe in COMPARED_ROWS],
        differences=[(key, list(map(_format_value, values))) for key, values in comparison.differences.items()],
    )
    path = Path(comparison.runs[0].path).resolve().parent / "comparison.html"
    replace_file(path, page.encode("utf-8", "replace"))
    return path


def comparison_text(comparison: Comparison) -> str:
    """Format a table of the results and the keys that differ."""
    rows = [("", *(run.name for run in comparison.runs))]
    rows += [(label, *(describe(run.summary) for run in comparison.runs)) for label, describe in COMPARED_ROWS]
    if comparison.differences:
        rows += [("",) * len(rows[0])]
        rows += [(key, *map(_format_value, values)) for key, values in comparison.differences.items()]
    return aligned(rows)


def _comparison_plans(metrics: Sequence[Metrics]) -> list[ChartPlan]:
    """Return the charts, with one more for each evaluation set if there are several."""
    caption = "Reward on the prompts of learner.evaluation."
    of_sets = rewards_of_sets(line for lines in metrics for line in lines)
    titles = {"Evaluations": "evaluation/reward"} | {f"Evaluations: {name}": of_sets[name] for name in of_sets}
    evaluations = [
        ChartPlan(title, caption, [Curve(metric, "reward", "blue", "points")]) for title, metric in titles.items()
    ]
    plans = [PLANS[title] for title in COMPARED]
    return plans[:EVALUATIONS_INDEX] + evaluations + plans[EVALUATIONS_INDEX:]


def _comparison_chart(comparison: Comparison, metrics: Sequence[Metrics], plan: ChartPlan) -> Chart | Absent:
    first = plan.curves[0]
    curves = [
        Curve(first.metric, run.name, color, first.kind) for run, color in zip(comparison.runs, COLORS, strict=False)
    ]
    return chart_of(plan, list(zip(curves, metrics, strict=True)))


def _run_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or whole paths if these are not unique."""
    names = [path.resolve().name for path in run_dirs]
    return names if len(set(names)) == len(names) else [str(path) for path in run_dirs]


def _config_of(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "config.toml"
    try:
        values = flatten(renamed(tomllib.loads(path.read_text("utf-8")))[0])
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{path} cannot be read ({error}), so the configs cannot be compared; restore it"
        ) from error
    # JSON has no inf, and null is the default.
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _format_value(value: Any) -> str:
    return "–" if value is None else str(value)
