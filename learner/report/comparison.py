"""A comparison of several runs: their results, their charts, and the config keys in which they differ.

    run directories ─▶ summary.py, config.toml ─▶ Comparison ─▶ comparison.html next to the first run
                                                             └▶ console table, or JSON

Like the report, the page needs no network and no other file, and nothing in a run changes.
"""

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from learner.report.charts import COLORS, PLANS, Absent, Chart, chart_of, rewards_of_sets
from learner.report.plans import ChartPlan
from learner.report.series import Curve, Metrics
from learner.report.summary import (
    RunDirectoryError,
    Summary,
    duration,
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

TITLES = ("Reward per step", "Reward over time", "Entropy", "Completion length", "Clipped tokens", "Throughput")
"""Charts of one metric, the first of each plan. The evaluations follow the rewards."""
EVALUATIONS_PLACE = 2
ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("steps", lambda s: f"{s.steps:,}"),
    ("time", lambda s: duration(s.seconds)),
    ("reward, first tenth", lambda s: number(s.reward_first, ".3f")),
    ("reward, last tenth", lambda s: number(s.reward_last, ".3f")),
    ("exact match", lambda s: number(s.exact_last, ".3f")),
    ("evaluation", lambda s: "–" if s.evaluation is None else f"{s.evaluation}, step {s.evaluation_step}"),
    ("completion tokens/s", lambda s: number(s.completion_tokens_per_s, ",.0f")),
    ("staleness", lambda s: number(s.staleness_mean)),
    ("mismatch", lambda s: number(s.mismatch_mean_abs_logprob, ".1e")),
    ("waits for", lambda s: f"{s.waited_for[0]}, {s.waited_for[1]:.0%}" if s.waited_for else "–"),
    ("groups lost", lambda s: f"{s.groups_lost:,}"),
)
IN_ANY_CASE = {"run_dir"}
"""Keys that differ between any two runs."""


class ComparedRun(msgspec.Struct, frozen=True):
    """A run in the comparison."""

    name: str
    path: str
    summary: Summary
    config: dict[str, Any]
    """Values by full key, without the keys that are not set."""


class Comparison(msgspec.Struct, frozen=True):
    """The compared runs, and the config keys in which they differ.

    Example of `differences`: {"learner.max_staleness": [0, None]}, where None is the default.
    """

    runs: list[ComparedRun]
    differences: dict[str, list[Any]]


def compare(run_dirs: Sequence[Path]) -> tuple[Comparison, list[list[dict[str, float]]]]:
    """Return the comparison and the metrics of each run. Raises RunDirectoryError."""
    if len(run_dirs) > len(COLORS):
        raise RunDirectoryError(f"{len(run_dirs)} runs cannot be compared in one report; select at most {len(COLORS)}")
    if twice := {str(path) for path in run_dirs if run_dirs.count(path) > 1}:
        raise RunDirectoryError(f"{', '.join(sorted(twice))} is given more than once; give each run once")
    metrics = [read_metrics(path) for path in run_dirs]
    runs = [
        ComparedRun(name, str(path), summary_of(lines, read_ledger(path), read_evaluations(path)), _config_of(path))
        for name, path, lines in zip(_names(run_dirs), run_dirs, metrics, strict=True)
    ]
    keys = sorted({key for run in runs for key in run.config} - IN_ANY_CASE)
    values = {key: [run.config.get(key) for run in runs] for key in keys}
    differences = {key: shown for key, shown in values.items() if any(one != shown[0] for one in shown)}
    return Comparison(runs, differences), metrics


def write_comparison(comparison: Comparison, metrics: Sequence[Metrics]) -> Path:
    """Write comparison.html next to the first run's directory and return its path."""
    charts = [_chart(comparison, metrics, plan) for plan in _plans(metrics)]
    page = render_page(
        "comparison.html.jinja",
        [chart for chart in charts if isinstance(chart, Chart)],
        names=[run.name for run in comparison.runs],
        rows=[(label, [describe(run.summary) for run in comparison.runs]) for label, describe in ROWS],
        differences=[(key, list(map(_format_value, values))) for key, values in comparison.differences.items()],
    )
    path = Path(comparison.runs[0].path).resolve().parent / "comparison.html"
    replace_file(path, page.encode("utf-8", "replace"))
    return path


def as_text(comparison: Comparison) -> str:
    """Format a table of the results and the keys that differ."""
    rows = [("", *(run.name for run in comparison.runs))]
    rows += [(label, *(describe(run.summary) for run in comparison.runs)) for label, describe in ROWS]
    if comparison.differences:
        rows += [("",) * len(rows[0])]
        rows += [(key, *map(_format_value, values)) for key, values in comparison.differences.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _plans(metrics: Sequence[Metrics]) -> list[ChartPlan]:
    """Return the charts, with one more for each evaluation set if there are several."""
    caption = "Reward on the prompts of learner.evaluation."
    of_sets = rewards_of_sets(line for lines in metrics for line in lines)
    titles = {"Evaluations": "evaluation/reward"} | {f"Evaluations: {name}": of_sets[name] for name in of_sets}
    evaluations = [
        ChartPlan(title, caption, [Curve(metric, "reward", "blue", "points")]) for title, metric in titles.items()
    ]
    plans = [PLANS[title] for title in TITLES]
    return plans[:EVALUATIONS_PLACE] + evaluations + plans[EVALUATIONS_PLACE:]


def _chart(comparison: Comparison, metrics: Sequence[Metrics], plan: ChartPlan) -> Chart | Absent:
    first = plan.curves[0]
    curves = [
        Curve(first.metric, run.name, color, first.kind) for run, color in zip(comparison.runs, COLORS, strict=False)
    ]
    return chart_of(plan, list(zip(curves, metrics, strict=True)))


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or whole paths if these are not unique."""
    names = [path.resolve().name for path in run_dirs]
    return names if len(set(names)) == len(names) else [str(path) for path in run_dirs]


def _config_of(run_dir: Path) -> dict[str, Any]:
    path = run_dir / "config.toml"
    try:
        return flatten(renamed(tomllib.loads(path.read_text()))[0])
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{path} cannot be read ({error}), so the configs cannot be compared; restore it"
        ) from error


def _format_value(value: Any) -> str:
    return "–" if value is None else str(value)
