"""The records of a run apart from its metrics: samples of completions, and events.

    the groups of a step ─▶ Samples ─▶ samples.jsonl ─▶ the report, the dashboard
    controller.py, the fleet's changes of state ─▶ Timeline ─▶ timeline.jsonl ─▶ "Events" in the report

A sample is a few completions of one group, once every few steps. Episodes have every branch, with the
version that sampled each text.
Invariants: samples.jsonl has at most MAX_BYTES. A cut keeps its head and its newest lines, and marks the first.
An event that cannot be written costs a warning, never the run.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:  # the report needs no tokenizer
    from transformers import PreTrainedTokenizerBase

from learner.environments.episode import EpisodeStats, EpisodeTurn, TokenSequence
from learner.prompts.reasoning import texts_of
from learner.report.sample_view import IS_CUT, MAX_COMPLETIONS
from learner.rollouts.rollout_group import RolloutGroup
from learner.storage.files import DiskError, JsonLinesFile, ends_of, last_lines, replace_file

ANSWER = "answer"
"""Column that the built-in reward functions compare with."""
MAX_BYTES = 32 << 20
MAX_PROMPT_TOKENS = 2048
"""Maximum length of a branch's prompt in a sample. Pages show less."""
log = logging.getLogger(__name__)
SHOWN_BYTES = 16 << 10
"""Bytes to read at each end of a longer timeline."""


class Samples:
    """Writer of the samples.jsonl of one run."""

    def __init__(self, path: Path, every_steps: int) -> None:
        self._path, self._every_steps = path, every_steps
        self._lines = JsonLinesFile(path)

    def keep(
        self, step: int, group: RolloutGroup, tokenizer: "PreTrainedTokenizerBase", row: Callable[[], Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """Write a sample of a group and return it, or None if it is not the step's turn.

        `row` returns the columns of the group's prompt. Raises DiskError.
        """
        if self._every_steps == 0 or (step - 1) % self._every_steps:
            return None
        kept = [branches[-1] for branches in group.branches_G[:MAX_COMPLETIONS]]
        texts = texts_of(tokenizer, [branch.token_ids.tolist() for branch in kept])
        prompt = tokenizer.decode(group.prompt_token_ids.tolist())
        rewards = group.rewards_G[:MAX_COMPLETIONS]
        sample: dict[str, Any] = {"step": step, "prompt": prompt, "completions": texts, "rewards": rewards}
        sample["group_size"] = len(group.branches_G)
        if (answer := row().get(ANSWER)) is not None:
            sample["answer"] = msgspec.to_builtins(answer, enc_hook=str)
        if len(group.rewards_by_function) > 1:
            sample["functions"] = {name: by[:MAX_COMPLETIONS] for name, by in group.rewards_by_function.items()}
        if group.stats_G:
            episodes = zip(group.stats_G[:MAX_COMPLETIONS], group.turns_G_K, group.branches_G, strict=False)
            sample["episodes"] = [episode_of(*episode, tokenizer) for episode in episodes]
        extra = {column: values[:MAX_COMPLETIONS] for column, values in group.logged_extra.items()}
        sample |= {"extra": extra} if extra else {}
        self._lines.append(sample)
        if self._path.stat().st_size > MAX_BYTES:
            self._cut()
        return sample

    def close(self) -> None:
        self._lines.close()

    def _cut(self) -> None:
        self._lines.close()
        first, *others = ends_of(self._path, MAX_BYTES // 4)
        (newest,) = last_lines(self._path, 1, 1)
        if newest not in (first, *others):  # it is longer than what is kept, and so may be the first
            first, *others = [line for line in (first, *others, newest) if line] + [b""]
        with suppress(ValueError, TypeError):  # the line is damaged
            first = json.dumps(json.loads(first) | {IS_CUT: True}).encode()
        replace_file(self._path, b"\n".join([first, *others]))
        self._lines = JsonLinesFile(self._path)


def episode_of(
    stats: EpisodeStats,
    turns: list[EpisodeTurn],
    branches: list[TokenSequence],
    tokenizer: "PreTrainedTokenizerBase",
) -> dict[str, Any]:
    """Return an episode as text, in JSON types.

    `runs` pairs each text with the version that sampled it, or None for text that the policy did not sample.
    The texts include special tokens, which separate the turns. Of a long prompt, only the beginning is kept.
    """
    return {
        "state": stats.state,
        "turns": stats.num_turns,
        "calls": stats.num_calls,
        "failed_calls": stats.num_failed_calls,
        "environment_s": stats.environment_s,
        "turn_rewards": [turn.reward for turn in turns],
        "branches": [
            {
                "prompt": _prompt(branch, tokenizer),
                "runs": _runs(branch, tokenizer),
            }
            for branch in branches
        ],
    }


def _prompt(branch: TokenSequence, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the branch's own prompt, or only its beginning, because a branch may start at each of many turns."""
    if branch.prompt_token_ids is None:
        return None
    text = tokenizer.decode(branch.prompt_token_ids[:MAX_PROMPT_TOKENS].tolist())
    num_more = len(branch.prompt_token_ids) - MAX_PROMPT_TOKENS
    return f"{text} … ({num_more:,} more tokens)" if num_more > 0 else str(text)


def _runs(branch: TokenSequence, tokenizer: "PreTrainedTokenizerBase") -> list[tuple[int | None, str]]:
    ends = np.cumsum([count for _, count in branch.versions])
    texts = tokenizer.batch_decode([ids.tolist() for ids in np.split(branch.token_ids, ends[:-1])])
    return [(version, text) for (version, _), text in zip(branch.versions, texts, strict=True)]


class Event(msgspec.Struct, frozen=True):
    """A line of timeline.jsonl. `time` is in seconds since 1970."""

    time: float
    what: str


class Timeline:
    """Writer of events, for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLinesFile(path)

    def record(self, what: str) -> None:
        try:
            self._lines.append({"time": time.time(), "what": what})
        except DiskError as error:
            log.warning("cannot record an event for the report: %s (%s)", what, error)

    def close(self) -> None:
        self._lines.close()


def read_events(path: Path) -> list[Event]:
    """Return the events in file order, only from both ends of a long file.

    Invalid lines are skipped.
    """
    if not path.is_file():
        return []
    events = []
    for line in ends_of(path, SHOWN_BYTES):
        try:
            events.append(msgspec.convert(json.loads(line), Event))
        except (ValueError, msgspec.ValidationError):  # the torn last line of a killed writer
            continue
    return events
