"""The report of a run: one HTML file that needs no network, no script and no other file.

It stands at the end of the data's way and reads only the run directory (through `summary`). Prompts and completions
are text that a model wrote, so everything is escaped by the template and the page's policy forbids scripts and loads.
"""

import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from learner.report.charts import Absent, Chart, draw_charts
from learner.report.lines import ends_of
from learner.report.summary import Summary, duration, number, read_ledger, read_metrics, steps_in, summary_of
from learner.report.timeline import read_events
from learner.storage.disk import replace_file

SAMPLED_STEPS = 2  # at each end of the run
SAMPLED_BYTES = 4 << 20  # of samples.jsonl, read at each end
MAX_COMPLETIONS = 6
MAX_CHARACTERS = 1200
# What a browser would not show of a C0 control character, as its picture (U+2400…); tab and newline stay.
VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}


class Tile(msgspec.Struct, frozen=True):
    label: str
    value: str
    note: str
    good: bool | None = None


class Completion(msgspec.Struct, frozen=True):
    text: str
    reward: str
    percent: int | None
    """The reward's place between the lowest and the highest shown; None where there was no reward."""


class Sample(msgspec.Struct, frozen=True):
    step: int
    prompt: str
    answer: str | None
    completions: list[Completion]
    more: int


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into the run directory, whole or not at all."""
    run_dir = Path(run_dir)
    path = run_dir / "report.html"
    replace_file(path, render(run_dir).encode("utf-8", "replace"))
    return path


def render(run_dir: Path) -> str:
    metrics, ledger = read_metrics(run_dir), read_ledger(run_dir)
    summary = summary_of(metrics, ledger)
    charts = draw_charts(metrics, ledger.staleness_histogram)
    samples_path, config_path = run_dir / "samples.jsonl", run_dir / "config.toml"
    samples = steps_in(ends_of(samples_path, SAMPLED_BYTES), samples_path) if samples_path.is_file() else []
    low, high = reward_range(samples)
    early = samples[:SAMPLED_STEPS]
    late = samples[len(early) :][-SAMPLED_STEPS:]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        name=run_dir.resolve().name,
        ended=ended_at(metrics),
        summary=summary,
        tiles=tiles_of(summary),
        counts=ledger.counts,
        charts=[chart for chart in charts if isinstance(chart, Chart)],
        absent=[chart for chart in charts if isinstance(chart, Absent)],
        events=[(clock(event.time), readable(event.what)) for event in read_events(run_dir / "timeline.jsonl")],
        markup=Markup,
        duration=duration,
        ends=[
            ("At the start", [shown(line, low, high) for line in early]),
            ("At the end", [shown(line, low, high) for line in late]),
        ],
        config=config_path.read_text("utf-8", "replace") if config_path.is_file() else None,
    )


def tiles_of(s: Summary) -> list[Tile]:
    stall = s.push_stall_median_s
    tiles = [
        Tile("Reward", f"{number(s.reward_first)} → {number(s.reward_last)}", "first and last tenth of the steps"),
        Tile("Exact match", number(s.exact_last), "last tenth of the steps") if s.exact_last is not None else None,
        Tile("Steps", f"{s.steps:,}", f"in {duration(s.seconds)}"),
        Tile("Speed", number(s.completion_tokens_per_s, ",.0f"), "completion tokens per second"),
        Tile(
            "Staleness",
            number(s.staleness_mean),
            f"policy versions, at most {number(s.staleness_max, '.0f')}",
        ),
        Tile("Push", "–" if stall is None else f"{1000 * stall:,.0f} ms", "without generation, median"),
        Tile("Mismatch", number(s.mismatch_mean_abs_logprob, ".1e"), "mean |Δ logprob| of the two sides"),
        Tile("Waited for", s.waited_for[0], f"{s.waited_for[1]:.0%} of the time") if s.waited_for else None,
        Tile("Groups lost", f"{s.groups_lost:,}", f"of {s.groups_admitted:,} admitted", s.groups_lost == 0),
    ]
    return [tile for tile in tiles if tile is not None]


def shown(line: dict[str, Any], low: float, high: float) -> Sample:
    texts, rewards = line.get("completions", []), line.get("rewards", [])
    rewards = [*rewards, *[None] * (len(texts) - len(rewards))]
    completions = []
    for text, reward in list(zip(texts, rewards, strict=False))[:MAX_COMPLETIONS]:
        place = None if reward is None else round(100 * (reward - low) / (high - low)) if high > low else 100
        completions.append(Completion(readable(text), number(reward), place))
    answer = line.get("answer")
    return Sample(
        step=line["step"],
        prompt=readable(line.get("prompt", "")),
        answer=None if answer is None else readable(answer),
        completions=completions,
        more=max(0, len(texts) - MAX_COMPLETIONS),
    )


def readable(value: Any) -> str:
    """Text as it is, a chat as its turns, anything else as Python shows it; shortened, control characters visible."""
    if isinstance(value, list) and all(isinstance(turn, dict) and "content" in turn for turn in value):
        value = "\n".join(f"{turn.get('role', '?')}: {turn['content']}" for turn in value)
    text = value if isinstance(value, str) else repr(value)
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]} … ({len(text) - MAX_CHARACTERS:,} more characters)"
    return text.translate(VISIBLE)


def reward_range(samples: list[dict[str, Any]]) -> tuple[float, float]:
    rewards = [reward for line in samples for reward in line.get("rewards", []) if reward is not None]
    return (min(rewards), max(rewards)) if rewards else (0.0, 1.0)


def ended_at(metrics: list[dict[str, float]]) -> str | None:
    seconds = metrics[-1].get("time")
    return None if seconds is None else clock(seconds, "%-d %B %Y, %H:%M UTC")


def clock(seconds: float, spec: str = "%-d %b, %H:%M:%S") -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime(spec)
