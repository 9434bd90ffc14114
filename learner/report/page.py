"""The report of a run: one HTML file that needs no network and no other file.

The report reads only the run directory, through `summary`. Prompts and completions are untrusted text, so the
template escapes everything, and the page's policy forbids loads and all scripts but our own.
"""

import datetime
from pathlib import Path

import msgspec

from learner.evaluation.results import Estimate
from learner.report.charts import Absent, Chart, evaluations_of_run, run_charts
from learner.report.records import read_events
from learner.report.sample_view import readable, table_of_run
from learner.report.summary import (
    Summary,
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


class Tile(msgspec.Struct, frozen=True):
    label: str
    value: str
    note: str
    good: bool | None = None


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
