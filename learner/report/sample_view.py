"""The table of completions: readable text, with the speaker and policy version of each span.

samples.jsonl ─▶ Sample ─▶ Table ─▶ completions.html.jinja, in the report and the dashboard
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from learner.report.summary import duration, number, steps_in
from learner.storage.files import ends_of, last_lines
from protocol.console import counted

MAX_COMPLETIONS = 4
"""Maximum number of completions of a group that a run records and that a page shows."""
IS_CUT = "is_cut"
"""Key of the first line of a samples.jsonl that has lost its middle to the limit of its size."""
MAX_CHARACTERS = 1200
MAX_SAMPLES = 25
"""Number of samples at each end of a run that the report shows."""
NEWEST_SAMPLES = 10
"""Number of samples that the dashboard shows."""
NEWEST_BYTES = 8 << 20
"""Bytes at the end of samples.jsonl that the dashboard reads if NEWEST_SAMPLES lines are that long."""
SAMPLED_BYTES = 4 << 20
"""Bytes of samples.jsonl that the report reads at each end."""
# Pictures (U+2400…) for the control characters that a browser would not show; tab and newline stay.
VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
NUM_COLORS = 3
"""Number of colors for versions. Episodes rarely have more versions, and the legend names each."""


class TextSpan(msgspec.Struct, frozen=True):
    """Text of one speaker."""

    text: str
    speaker: str
    """CSS class of the color: v0 to v2 by version, or another for text not sampled."""


class Passage(msgspec.Struct, frozen=True):
    """Branch of an episode."""

    prompt: str | None
    """Prompt of the branch, or None if it is the group's prompt."""
    spans: list[TextSpan]


class ShownCompletion(msgspec.Struct, frozen=True):
    passages: list[Passage]
    reward: str
    tenths: int | None
    """Position of the reward in `reward_range` in tenths, or None without a reward."""
    description: str | None = None
    """Description of the episode."""
    functions: dict[str, str] = {}
    """Reward of each reward function, if there are several."""


class Sample(msgspec.Struct, frozen=True):
    step: int
    prompt: str
    answer: str | None
    completions: list[ShownCompletion]
    more: int
    """Number of completions of the group that are not shown."""
    versions: list[tuple[str, int]]
    """(CSS class of the color, version) of each version in the episodes."""


class Table(msgspec.Struct, frozen=True):
    samples: list[Sample]
    functions: list[str]
    """Names of the reward functions, one column each."""
    note: str


def table_of_run(path: Path) -> Table:
    """Return the first and the last samples of a run, for the report. Raises RunDirectoryError."""
    is_read_in_part = path.is_file() and path.stat().st_size > 2 * SAMPLED_BYTES
    lines = steps_in(ends_of(path, SAMPLED_BYTES), path) if path.is_file() else []
    kept = lines if len(lines) <= 2 * MAX_SAMPLES else lines[:MAX_SAMPLES] + lines[-MAX_SAMPLES:]
    if lines and lines[0].get(IS_CUT):
        return table_of(
            kept,
            "Groups from both ends of the run. samples.jsonl has reached the limit of its size and no longer has "
            "those in between; for samples of a whole run, raise learner.report.samples_every_steps.",
        )
    if is_read_in_part:
        return table_of(kept, "Groups from both ends of samples.jsonl. The groups in between are left out.")
    return table_of(kept, "" if kept == lines else f"The first and the last {MAX_SAMPLES} groups of samples.jsonl.")


def newest_table(path: Path) -> Table:
    """Return the newest samples, the newest first, for the dashboard.

    Raises:
        OSError: The file cannot be read.
        RunDirectoryError: A line is not a sample.
    """
    if not path.is_file():
        return table_of([], "")
    count = NEWEST_SAMPLES
    while True:
        raw_lines = last_lines(path, count, NEWEST_BYTES)
        lines = steps_in([*raw_lines, b""], path)  # b"": the last line is complete, so a broken one is an error
        if len(lines) >= NEWEST_SAMPLES or len(raw_lines) < count:
            break
        count *= 2  # a resume repeated some of the steps
    return table_of(lines[: -NEWEST_SAMPLES - 1 : -1], f"The newest {NEWEST_SAMPLES} groups of samples.jsonl.")


def table_of(lines: Sequence[dict[str, Any]], note: str) -> Table:
    low, high = reward_range(lines)
    functions = sorted({name for line in lines for name in line.get("functions", {})})
    return Table([shown(line, low, high) for line in lines], functions, note)


def shown(line: dict[str, Any], low: float, high: float) -> Sample:
    texts, rewards, episodes = line.get("completions", []), line.get("rewards", []), line.get("episodes", [])
    functions = line.get("functions", {})
    versions = sorted({run[0] for one in episodes for branch in one["branches"] for run in branch["runs"]} - {None})
    colors = {version: f"v{i % NUM_COLORS}" for i, version in enumerate(versions)}
    completions = []
    for i, text in enumerate(texts[:MAX_COMPLETIONS]):
        reward = rewards[i] if i < len(rewards) else None
        tenths = None if reward is None else round(10 * (reward - low) / (high - low))
        parts = {name: number(by[i]) for name, by in functions.items() if i < len(by)}
        if i < len(episodes):
            passages = [_passage(branch, colors) for branch in episodes[i]["branches"]]
            completions.append(ShownCompletion(passages, number(reward), tenths, _describe_episode(episodes[i]), parts))
        else:
            passages = [Passage(None, [TextSpan(readable(text), "")])]
            completions.append(ShownCompletion(passages, number(reward), tenths, functions=parts))
    answer = line.get("answer")
    return Sample(
        step=line["step"],
        prompt=readable(line.get("prompt", "")),
        answer=None if answer is None else readable(answer),
        completions=completions,
        more=max(line.get("group_size", 0), len(texts)) - len(completions),
        versions=[(colors[version], version) for version in versions],
    )


def _passage(branch: dict[str, Any], colors: dict[int, str]) -> Passage:
    prompt = branch["prompt"]
    spans = [
        TextSpan(readable(text), "environment" if version is None else colors[version])
        for version, text in branch["runs"]
    ]
    return Passage(None if prompt is None else readable(prompt), spans)


def _describe_episode(episode: dict[str, Any]) -> str:
    parts = [episode["state"], counted(episode["turns"], "turn")]
    if episode["calls"]:
        parts.append(counted(episode["calls"], "tool call"))
    if episode["failed_calls"]:
        parts.append(f"{episode['failed_calls']} answered with an error")
    turn_rewards = episode.get("turn_rewards", [])  # runs before this version have none
    if any(reward is not None for reward in turn_rewards):
        parts.append(f"rewards of turns: {', '.join(map(number, turn_rewards))}")
    return " · ".join([*parts, f"{duration(episode['environment_s'])} in the environment"])


def readable(value: Any) -> str:
    """Format text as it is, a chat as its turns, and anything else with repr.

    Long text is shortened, and control characters are visible.
    """
    if isinstance(value, list) and all(isinstance(turn, dict) and "content" in turn for turn in value):
        value = "\n".join(f"{turn.get('role', '?')}: {turn['content']}" for turn in value)
    text = value if isinstance(value, str) else repr(value)
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]} … ({len(text) - MAX_CHARACTERS:,} more characters)"
    return text.translate(VISIBLE)


def reward_range(samples: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the rewards at both ends of the color scale: 0 and 1, or the extremes beyond them."""
    rewards = [reward for line in samples for reward in line.get("rewards", []) if reward is not None]
    return min([0.0, *rewards]), max([1.0, *rewards])
