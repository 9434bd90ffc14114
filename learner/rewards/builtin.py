"""Built-in reward functions, named in the config without a module. They have TRL's signature, as a user's have.

They run in the reward workers, after a group has come back and before its advantages. Invariant: pure functions of their
arguments; `None` means that a completion cannot be scored, never that it is wrong.
"""

import logging
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from learner.rewards.answers import (
    answer_of,
    completion_text,
    concluded,
    golds_of,
    is_hedged,
    is_words,
    last_box,
    num_boxes,
    same_words,
    with_mixed_numbers,
)

_DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
_NUMBER = re.compile(
    r"(?:(?<![\w.)])(?:-|(?<![\d)]\s)-\s)\$?)?"  # the sign of "-5", "- 5" and "-$5", but not of "7-5" and "7 - 5"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][+-]?\d{1,4}(?!\w))?"
)
MINUS = "\N{MINUS SIGN}"
_THINK_FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def exact_match(
    completions: Sequence[Any], answer: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any
) -> list[float | None]:
    """1 if the answer, without surrounding white space, is the `answer` column; else 0; None if the column is empty."""
    return [
        float(answer_of(completion, opens_reasoning=opens_reasoning).strip() in map(str.strip, golds))
        if (golds := golds_of(gold))
        else None
        for completion, gold in zip(completions, answer, strict=True)
    ]


def last_number(
    completions: Sequence[Any], answer: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any
) -> list[float | None]:
    """1 if the last number of the answer, or the first behind `####`, is the `answer` column; None if the column is not one number.

    Of a GSM8K gold only what follows `####` counts. Thousands separators are read: "1,234" is 1234, and "100,200" is not 200.
    """
    rewards: list[float | None] = []
    for completion, column in zip(completions, answer, strict=True):
        texts = [gold.rpartition("####")[2].strip().replace(MINUS, "-") for gold in golds_of(column)]
        golds = {_value(gold) for gold in texts if _NUMBER.fullmatch(gold)}
        _, mark, said = answer_of(completion, opens_reasoning=opens_reasoning).replace(MINUS, "-").rpartition("####")
        numbers = _NUMBER.findall(said)
        number = numbers[0 if mark else -1] if numbers else None
        rewards.append(float(number is not None and _value(number) in golds) if golds else None)
    return rewards


def _value(number: str) -> Decimal:
    return Decimal(re.sub(r"[,$\s]", "", number))


def share_right(
    completions: Sequence[Any], answer: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any
) -> list[float | None]:
    """Share of the `answer` column's characters that are in their places, the end counted as one more character.

    Without the end, a model that has every character right has hardly a reason to stop.
    """
    texts = [answer_of(completion, opens_reasoning=opens_reasoning) for completion in completions]
    return [
        max((_share_right(text, one) for one in golds_of(gold)), default=None)
        for text, gold in zip(texts, answer, strict=True)
    ]


def think_format(completions: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any) -> list[float | None]:
    """1 if the whole completion is `<think>…</think><answer>…</answer>`, of which the prompt may have opened the first; else 0."""
    texts = [completion_text(completion, opens_reasoning=opens_reasoning).strip() for completion in completions]
    return [float(_THINK_FORMAT.fullmatch(text) is not None) for text in texts]


def math_equivalence(
    completions: Sequence[Any], answer: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any
) -> list[float | None]:
    """1 if the completion's last answer is mathematically the `answer` column; None if the column is empty.

    Of a GSM8K gold only what follows `####` counts. Ask in the prompt for answers in `\\boxed{}` or `$…$`: of LaTeX without
    delimiters math-verify finds a number at most. What else it judges wrongly is marked in the tests' math_pairs.tsv.
    Its own timeouts are off, for they need signals; a completion such as `\\boxed{9^{9^{9}}}` costs itself alone (lanes.py).
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every timeout that is off
    rewards: list[float | None] = []
    known: dict[str, list[_Gold]] = {}
    for completion, column in zip(completions, answer, strict=True):
        golds = known.get(key := repr(column))
        if golds is None:
            golds = known[key] = [_Gold(text.rpartition("####")[2].strip()) for text in golds_of(column)]
        text = answer_of(completion, opens_reasoning=opens_reasoning).strip()
        can_be_judged = any(gold.is_readable for gold in golds)
        rewards.append(float(any(gold.is_met_by(text) for gold in golds)) if can_be_judged else None)
    return rewards


class _Gold:
    """One right answer: words, which are compared as text, or mathematics."""

    def __init__(self, text: str) -> None:
        self._text, self._is_words = text, is_words(text)
        self._parsed = [] if self._is_words else _parsed_gold(with_mixed_numbers(text))
        self._is_several = "," in text or "\\pm" in text
        self.is_readable = bool(self._is_words or self._parsed)

    def is_met_by(self, text: str) -> bool:
        """Of several boxes the last one counts, unless the gold is several numbers."""
        if text == self._text:
            return True
        box = last_box(text)
        if box is not None and not box.strip():
            return False
        if self._is_words:
            return same_words(concluded(text) if box is None else box, self._text)
        if box is None:
            marked = text.rpartition("####")
            said = marked[2].strip().partition("\n")[0] if marked[1] else text
            if not self._is_several and not _DELIMITED.search(said) and is_hedged(said):
                return False
        elif self._is_several and num_boxes(text) > 1:
            said = text
        else:
            said = f"\\boxed{{{with_mixed_numbers(box)}}}"
        return _verify(self._parsed, _parsed(said))


def _parsed_gold(gold: str) -> Any:
    """A gold is LaTeX without delimiters (`2\\sqrt{3}`), of which a bare parse finds no more than a number; or it has its own."""
    return (not _DELIMITED.search(gold) and _parsed(f"${gold}$")) or _parsed(gold)


def _parsed(text: str) -> Any:
    from math_verify import parse  # which takes a second, in the processes of those who use it

    return parse(text, parsing_timeout=None)


def _verify(gold: Any, answer: Any) -> bool:
    from math_verify import verify

    return bool(verify(gold, answer, timeout_seconds=None))


def _share_right(text: str, gold: str) -> float:
    matches = sum(one == other for one, other in zip(text, gold, strict=False))
    return (matches + (len(text) == len(gold))) / (len(gold) + 1)


def environment_reward(
    completions: Sequence[Any], environment_rewards: Sequence[float | None], **kwargs: Any
) -> list[float | None]:
    """What the environment itself says of each episode (`get_reward`)."""
    return list(environment_rewards)


BUILT_IN = {
    function.__name__: function
    for function in (exact_match, last_number, share_right, think_format, math_equivalence, environment_reward)
}
