"""Built-in reward functions for answers in text: words, a number, a letter, a format.

They have TRL's signature, as users' functions have, and run in the reward workers. They import only what is
installed in TRL's environment too.
Invariant: pure functions of their arguments. None means that a completion cannot be scored, never that it is
wrong.
"""

import re
import string
from collections.abc import Sequence
from typing import Any

from learner.rewards.builtin.answers import (
    answer_of,
    as_number,
    chosen,
    completion_text,
    golds_of,
    last_number_in,
)
from learner.sandbox.user_code import shorten

_THINK_FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def exact_match(
    completions: Sequence[Any], answer: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any
) -> list[float | None]:
    """Return 1 if the answer equals the `answer` column, else 0.

    Surrounding white space does not count. An empty column gives None.
    """
    return [
        float(answer_of(completion, opens_reasoning=opens_reasoning).strip() in map(str.strip, golds))
        if (golds := golds_of(gold))
        else None
        for completion, gold in zip(completions, answer, strict=True)
    ]


def last_number(
    completions: Sequence[Any], answer: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any
) -> list[float | None]:
    """Return 1 if the number of the answer equals the `answer` column, else 0.

    This is the first number after `####`, else the last one. A column that is not one number gives None. Only
    the text after `####` of a GSM8K gold counts. Thousands separators are read: "1,234" and `1{,}234` are
    1234, and "100,200" is not 200.
    """
    rewards: list[float | None] = []
    for completion, column in zip(completions, answer, strict=True):
        golds = {as_number(gold.rpartition("####")[2]) for gold in golds_of(column)} - {None}
        number = last_number_in(answer_of(completion, opens_reasoning=opens_reasoning))
        rewards.append(float(number in golds) if golds else None)
    return rewards


def multiple_choice(
    completions: Sequence[Any], answer: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any
) -> list[float | None]:
    """Return 1 if the answer chooses the letter in the `answer` column, else 0.

    An answer that names two letters gets 0. An empty column gives None. Recognized are `\\boxed{B}`, "the
    answer is (B)", "#### B", and a last line that is "B", "(B)" or "B. Paris". A whole number in the column
    counts from 0, as in MMLU: 1 is B.
    """
    rewards: list[float | None] = []
    for completion, column in zip(completions, answer, strict=True):
        golds = {_letter(gold) for gold in (column if isinstance(column, list) else [column]) if gold not in (None, "")}
        choice = chosen(answer_of(completion, opens_reasoning=opens_reasoning))
        rewards.append(float(choice in golds) if golds else None)
    return rewards


def share_right(
    completions: Sequence[Any], answer: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any
) -> list[float | None]:
    """Return the share of the `answer` column's characters that are in their positions.

    The end counts as one more character. Otherwise a model with every character right hardly has a reason to
    stop.
    """
    texts = [answer_of(completion, opens_reasoning=opens_reasoning) for completion in completions]
    return [
        max((_share_right(text, one) for one in golds_of(gold)), default=None)
        for text, gold in zip(texts, answer, strict=True)
    ]


def think_format(completions: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any) -> list[float | None]:
    """Return 1 if a completion is `<think>…</think><answer>…</answer>`, else 0.

    The prompt may have opened the first tag.
    """
    texts = [completion_text(completion, opens_reasoning=opens_reasoning).strip() for completion in completions]
    return [float(_THINK_FORMAT.fullmatch(text) is not None) for text in texts]


def environment_reward(
    completions: Sequence[Any], environment_rewards: Sequence[float | None], **kwargs: Any
) -> list[float | None]:
    """Return the environment's own reward of each episode (`get_reward`)."""
    return list(environment_rewards)


def _letter(gold: Any) -> str:
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(string.ascii_uppercase):
        return string.ascii_uppercase[gold]
    choice = chosen(gold) if isinstance(gold, str) else None
    if choice is None:
        raise ValueError(f"column answer contains {shorten(gold)}; expected a letter, or its number from 0")
    return choice


def _share_right(text: str, gold: str) -> float:
    matches = sum(one == other for one, other in zip(text, gold, strict=False))
    return (matches + (len(text) == len(gold))) / (len(gold) + 1)
