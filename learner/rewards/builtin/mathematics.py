"""`math_equivalence`: whether an answer is the same mathematics as its gold, by math-verify, and the same words where the gold is words.

Invariant: pure, and right for every pair of math_pairs.tsv among the tests that is not marked there.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

from learner.rewards.builtin.answers import (
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

_DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")


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
        self._text, self._is_words, self._is_time = text, is_words(text), is_time(text)
        self._parsed = [] if self._is_words else _parsed_gold(with_mixed_numbers(text))
        self._is_several = "," in text or "\\pm" in text
        self.is_readable = bool(self._is_words or self._is_time or self._parsed)

    def is_met_by(self, text: str) -> bool:
        """Of several boxes the last one counts, unless the gold is several numbers."""
        if text == self._text:
            return True
        box = last_box(text)
        if box is not None and not box.strip():
            return False
        if self._is_words:
            return same_words(concluded(text) if box is None else box, self._text)
        if self._is_time and same_time(concluded(text) if box is None else box, self._text):
            return True  # else it may be a ratio
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
