"""What completions look like: samples.jsonl, a few of one group every so many steps, for the report and for people; of episodes
each branch, with who said what.

Between the steps and the report. Invariant: the file has at most MAX_BYTES, however long the run: its head stays, and of what
comes after it the newest.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from learner.environments.branch import Branch
from learner.environments.episode import Course
from learner.prompts.reasoning import texts_of
from learner.rollouts.scored_group import ScoredGroup
from learner.storage.disk import replace_file
from learner.storage.lines import Lines, ends_of

ANSWER = "answer"
"""The column that the built-in reward functions compare with."""
MAX_COMPLETIONS = 4
MAX_BYTES = 32 << 20


class Samples:
    """The file of one run, open for appending."""

    def __init__(self, path: Path, every_steps: int) -> None:
        self._path, self._every_steps = path, every_steps
        self._lines = Lines(path)

    def keep(
        self, step: int, group: ScoredGroup, tokenizer: PreTrainedTokenizerBase, row: Callable[[], Mapping[str, Any]]
    ) -> dict[str, Any] | None:
        """Write a group down as text, and return that, if it is the step's turn; `row` gives the columns of its prompt. Raises DiskError."""
        if self._every_steps == 0 or (step - 1) % self._every_steps:
            return None
        kept = [branches[-1] for branches in group.branches_G[:MAX_COMPLETIONS]]
        texts = texts_of(tokenizer, [branch.token_ids.tolist() for branch in kept])
        prompt = tokenizer.decode(group.prompt_token_ids.tolist())
        rewards = group.rewards_G[:MAX_COMPLETIONS]
        sample: dict[str, Any] = {"step": step, "prompt": prompt, "completions": texts, "rewards": rewards}
        if (answer := row().get(ANSWER)) is not None:
            sample["answer"] = msgspec.to_builtins(answer, enc_hook=str)
        if len(group.rewards_by_function) > 1:
            sample["functions"] = {name: by[:MAX_COMPLETIONS] for name, by in group.rewards_by_function.items()}
        if group.courses_G:
            episodes = zip(group.courses_G[:MAX_COMPLETIONS], group.branches_G, strict=False)
            sample["episodes"] = [episode_of(course, branches, tokenizer) for course, branches in episodes]
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
        replace_file(self._path, b"\n".join(ends_of(self._path, MAX_BYTES // 4)))
        self._lines = Lines(self._path)


def episode_of(course: Course, branches: list[Branch], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """`runs`: texts with the version that sampled each, None where the policy did not; special tokens are in them, for they part the
    turns.
    """
    return {
        "state": course.state,
        "turns": course.num_turns,
        "calls": course.num_calls,
        "failed_calls": course.num_failed_calls,
        "environment_s": course.environment_s,
        "branches": [
            {
                "prompt": None
                if branch.prompt_token_ids is None
                else tokenizer.decode(branch.prompt_token_ids.tolist()),
                "runs": _runs(branch, tokenizer),
            }
            for branch in branches
        ],
    }


def _runs(branch: Branch, tokenizer: PreTrainedTokenizerBase) -> list[tuple[int | None, str]]:
    ends = np.cumsum([count for _, count in branch.versions])
    texts = tokenizer.batch_decode([ids.tolist() for ids in np.split(branch.token_ids, ends[:-1])])
    return [(version, text) for (version, _), text in zip(branch.versions, texts, strict=True)]
