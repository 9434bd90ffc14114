"""Samples as the report shows them: text that a model wrote, made readable; of an episode who said what, and under which version.

a line of samples.jsonl ─▶ Sample ─▶ report.html.jinja, or as JSON dashboard.html.jinja
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from learner.report.summary import duration, number
from learner.storage.files import last_line

MAX_COMPLETIONS = 6
MAX_CHARACTERS = 1200
# What a browser would not show of a C0 control character, as its picture (U+2400…); tab and newline stay.
VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
NUM_COLOURS = 3
"""Of versions; episodes are rarely of more, and the legend names each."""


class Piece(msgspec.Struct, frozen=True):
    """A text of one speaker."""

    text: str
    speaker: str
    """The class of its colour: said, or v0 to v2 by the version that sampled it."""


class Passage(msgspec.Struct, frozen=True):
    """A branch of an episode."""

    prompt: str | None
    """Its own, where it does not go on behind what was said before."""
    pieces: list[Piece]


class Completion(msgspec.Struct, frozen=True):
    passages: list[Passage]
    reward: str
    percent: int | None
    """The reward's place in `reward_range`; None where there was no reward."""
    course: str | None = None
    """How the episode went, in words."""
    functions: str | None = None
    """What each reward function gave it, where there are several."""


class Sample(msgspec.Struct, frozen=True):
    step: int
    prompt: str
    answer: str | None
    completions: list[Completion]
    more: int
    versions: list[tuple[str, int]]
    """The class of its colour, and the version; of episodes."""


def newest_sample(path: Path) -> Sample | None:
    """The last of samples.jsonl; None: there is none. Raises OSError and ValueError."""
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
        more=max(0, len(texts) - MAX_COMPLETIONS),
        versions=[(colours[version], version) for version in versions],
    )


def _passage(branch: dict[str, Any], colours: dict[int, str]) -> Passage:
    prompt = branch["prompt"]
    pieces = [
        Piece(readable(text), "said" if version is None else colours[version]) for version, text in branch["runs"]
    ]
    return Passage(None if prompt is None else readable(prompt), pieces)


def _course(episode: dict[str, Any]) -> str:
    parts = [episode["state"], _counted(episode["turns"], "turn")]
    if episode["calls"]:
        parts.append(_counted(episode["calls"], "tool call"))
    if episode["failed_calls"]:
        parts.append(f"{episode['failed_calls']} answered with an error")
    return " · ".join([*parts, f"{duration(episode['environment_s'])} in the environment"])


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def readable(value: Any) -> str:
    """Text as it is, a chat as its turns, anything else as Python shows it; shortened, control characters visible."""
    if isinstance(value, list) and all(isinstance(turn, dict) and "content" in turn for turn in value):
        value = "\n".join(f"{turn.get('role', '?')}: {turn['content']}" for turn in value)
    text = value if isinstance(value, str) else repr(value)
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]} … ({len(text) - MAX_CHARACTERS:,} more characters)"
    return text.translate(VISIBLE)


def reward_range(samples: list[dict[str, Any]]) -> tuple[float, float]:
    """Return what no mark and a full one stand for: 0 and 1, or what lies beyond."""
    rewards = [reward for line in samples for reward in line.get("rewards", []) if reward is not None]
    return min([0.0, *rewards]), max([1.0, *rewards])
