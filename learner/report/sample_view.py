"""Samples as the report shows them: readable text, with the speaker and policy version of each piece.

a line of samples.jsonl ─▶ Sample ─▶ report.html.jinja, or as JSON dashboard.html.jinja
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from learner.report.summary import duration, number
from learner.storage.files import last_line
from protocol.console import counted

MAX_COMPLETIONS = 4
"""Maximum number of completions of a group that a run records and that a page shows."""
MAX_CHARACTERS = 1200
# Pictures (U+2400…) for the control characters that a browser would not show; tab and newline stay.
VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
NUM_COLOURS = 3
"""Number of colors for versions. Episodes rarely have more versions, and the legend names each."""


class Piece(msgspec.Struct, frozen=True):
    """Text of one speaker."""

    text: str
    speaker: str
    """CSS class of the color: v0 to v2 by version, or another for text not sampled."""


class Passage(msgspec.Struct, frozen=True):
    """Branch of an episode."""

    prompt: str | None
    """Prompt of the branch, or None if it is the group's prompt."""
    pieces: list[Piece]


class Completion(msgspec.Struct, frozen=True):
    passages: list[Passage]
    reward: str
    percent: int | None
    """Position of the reward in `reward_range` in percent, or None without a reward."""
    course: str | None = None
    """Description of the episode."""
    functions: str | None = None
    """Reward of each reward function, if there are several."""


class Sample(msgspec.Struct, frozen=True):
    step: int
    prompt: str
    answer: str | None
    completions: list[Completion]
    more: int
    """Number of completions of the group that are not shown."""
    versions: list[tuple[str, int]]
    """(CSS class of the color, version) of each version in the episodes."""


def newest_sample(path: Path) -> Sample | None:
    """Return the last sample, or None without any. Raises OSError and ValueError."""
    line = last_line(path) if path.is_file() else b""
    if not line:
        return None
    sample = json.loads(line)
    return shown(sample, *reward_range([sample]))


def shown(line: dict[str, Any], low: float, high: float) -> Sample:
    texts, rewards, episodes = line.get("completions", []), line.get("rewards", []), line.get("episodes", [])
    functions = line.get("functions", {})
    versions = sorted({run[0] for one in episodes for branch in one["branches"] for run in branch["runs"]} - {None})
    colours = {version: f"v{place % NUM_COLOURS}" for place, version in enumerate(versions)}
    completions = []
    for i, text in enumerate(texts[:MAX_COMPLETIONS]):
        reward = rewards[i] if i < len(rewards) else None
        place = None if reward is None else round(100 * (reward - low) / (high - low))
        parts = " · ".join(f"{name} {number(by[i])}" for name, by in functions.items() if i < len(by)) or None
        if i < len(episodes):
            passages = [_passage(branch, colours) for branch in episodes[i]["branches"]]
            completions.append(Completion(passages, number(reward), place, _course(episodes[i]), parts))
        else:
            passages = [Passage(None, [Piece(readable(text), "")])]
            completions.append(Completion(passages, number(reward), place, functions=parts))
    answer = line.get("answer")
    return Sample(
        step=line["step"],
        prompt=readable(line.get("prompt", "")),
        answer=None if answer is None else readable(answer),
        completions=completions,
        more=max(line.get("group_size", 0), len(texts)) - len(completions),
        versions=[(colours[version], version) for version in versions],
    )


def _passage(branch: dict[str, Any], colours: dict[int, str]) -> Passage:
    prompt = branch["prompt"]
    pieces = [
        Piece(readable(text), "said" if version is None else colours[version]) for version, text in branch["runs"]
    ]
    return Passage(None if prompt is None else readable(prompt), pieces)


def _course(episode: dict[str, Any]) -> str:
    parts = [episode["state"], counted(episode["turns"], "turn")]
    if episode["calls"]:
        parts.append(counted(episode["calls"], "tool call"))
    if episode["failed_calls"]:
        parts.append(f"{episode['failed_calls']} answered with an error")
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


def reward_range(samples: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the rewards at 0 % and 100 %: 0 and 1, or the extremes beyond them."""
    rewards = [reward for line in samples for reward in line.get("rewards", []) if reward is not None]
    return min([0.0, *rewards]), max([1.0, *rewards])
