"""Reward function `math_equivalence`: compare answers with golds by math-verify.

A gold that is words is compared as words.
Invariant: pure, and right for every pair in the tests' math_pairs.tsv that is not marked there.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

from learner.rewards.builtin.answers import (
    after_mark,
    answer_of,
    concluded,
    golds_of,
    is_hedged,
    is_time,
    is_words,
    last_box,
    num_boxes,
    same_time,
    same_words,
    with_mixed_numbers,
)

_EMPHASIS = re.compile(r"(?<![\w)*`\\])(\*{1,3}|__|`)(?=\S)([^*`\n]{1,1000}?)(?<=\S)\1(?![\w(*`])")
"""Emphasis or code of Markdown, as in "**3/4**", which math-verify does not read. The power in "2**10" is none."""
_DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")


def math_equivalence(
    completions: Sequence[Any], answer: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any
) -> list[float | None]:
    """Return 1 if the answer mathematically equals the `answer` column, else 0.

    An empty column gives None. Only the text after `####` of a GSM8K gold counts. Ask in the prompt for
    answers in `\\boxed{}` or `$…$`: without delimiters math-verify finds at most a number. The tests'
    math_pairs.tsv marks its other misjudgments. math-verify's timeouts are off, because they need signals. A
    completion such as `\\boxed{9^{9^{9}}}` times out alone (`call_queues.py`).
    """
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every disabled timeout
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
    """One right answer: words or a time, which are compared as text, or mathematics."""

    def __init__(self, text: str) -> None:
        self._text, self._is_words, self._is_time = text, is_words(text), is_time(text)
        self._parsed = [] if self._is_words else _parsed_gold(with_mixed_numbers(text))
        is_number = bool(self._parsed) and getattr(self._parsed[0], "is_number", False)  # 1,234 has a comma too
        self._is_several = ("," in text and not is_number) or "\\pm" in text
        self.is_readable = bool(self._is_words or self._is_time or self._parsed)

    def is_met_by(self, text: str) -> bool:
        """Return whether a text gives this answer.

        The last of several boxes counts, unless the gold is several numbers.
        """
        if text == self._text:
            return True
        box = last_box(text)
        if box is not None and not box.strip():
            return False
        if self._is_words:
            return same_words(concluded(text) if box is None else box, self._text)
        if self._is_time and same_time(concluded(text) if box is None else box, self._text):
            return True  # otherwise it may be a ratio
        if box is None:
            is_marked, answer = after_mark(_EMPHASIS.sub(r"\2", text))
            answer = answer.strip().partition("\n")[0] if is_marked else answer
            if not self._is_several and not _DELIMITED.search(answer) and is_hedged(answer):
                return False
        elif self._is_several and num_boxes(text) > 1:
            answer = text
        else:
            answer = f"\\boxed{{{with_mixed_numbers(box)}}}"
        return _verify(self._parsed, _parsed(answer))


def _parsed_gold(gold: str) -> Any:
    """Parse a gold, which is LaTeX with or without delimiters.

    Without delimiters (`2\\sqrt{3}`), a bare parse finds at most a number.
    """
    return (not _DELIMITED.search(gold) and _parsed(f"${gold}$")) or _parsed(gold)


def _parsed(text: str) -> Any:
    from math_verify import parse  # takes a second, so only processes that use it import it

    return parse(text, parsing_timeout=None)


def _verify(gold: Any, answer: Any) -> bool:
    from math_verify import verify

    return bool(verify(gold, answer, timeout_seconds=None))
