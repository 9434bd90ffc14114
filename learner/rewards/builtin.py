"""Built-in reward functions, named in the config without a module. They have TRL's signature, as a user's have.

They run in the reward workers, after a group has come back and before its advantages. Invariant: pure functions of their
arguments; `None` means that a completion cannot be scored, never that it is wrong.
"""

import logging
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

_DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
_NUMBER = re.compile(
    r"(?:(?<![\w.)])(?:-|(?<![\d)]\s)-\s)\$?)?"  # the sign of "-5", "- 5" and "-$5", but not of "7-5" and "7 - 5"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][+-]?\d{1,4}(?!\w))?"
)
MINUS = "\N{MINUS SIGN}"
_THINK_FORMAT = re.compile(r"^<think>.*?</think>\s*<answer>.*?</answer>$", re.DOTALL)


def completion_text(completion: Any) -> str:
    """Return the text of a completion: itself, or the content of the last message of a conversational one."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1 if the completion, without surrounding white space, is the `answer` column; else 0."""
    pairs = zip(completions, answer, strict=True)
    return [float(completion_text(completion).strip() == str(gold).strip()) for completion, gold in pairs]


def last_number(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1 if the last number of the completion is the `answer` column; None if the column is not one number.

    Of a GSM8K answer only what follows `####` counts. Thousands separators are read: "1,234" is 1234, and "100,200" is not 200.
    """
    golds = [str(gold).rpartition("####")[2].strip().replace(MINUS, "-") for gold in answer]
    found = [_NUMBER.findall(completion_text(completion).replace(MINUS, "-")) for completion in completions]
    return [
        float(bool(numbers) and _value(numbers[-1]) == _value(gold)) if _NUMBER.fullmatch(gold) else None
        for numbers, gold in zip(found, golds, strict=True)
    ]


def _value(number: str) -> Decimal:
    return Decimal(re.sub(r"[,$\s]", "", number))


def share_right(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """Share of the `answer` column's characters that are in their places, the end counted as one more character.

    Without the end, a model that has every character right has hardly a reason to stop.
    """
    return [
        _share_right(completion_text(completion), str(gold))
        for completion, gold in zip(completions, answer, strict=True)
    ]


def think_format(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1 if the whole completion is `<think>…</think><answer>…</answer>`; else 0."""
    return [float(_THINK_FORMAT.match(completion_text(completion)) is not None) for completion in completions]


def math_equivalence(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1 if the completion's last answer is mathematically the `answer` column; None if the column is empty.

    Of a GSM8K answer only what follows `####` counts. Ask in the prompt for answers in `\\boxed{}` or `$…$`: of LaTeX without
    delimiters math-verify finds a number at most. What else it judges wrongly is marked in the tests' math_pairs.tsv.
    Its own timeouts are off, for they need signals; the deadline of the reward function ends what does not end by itself.
    """
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every timeout that is off
    rewards: list[float | None] = []
    golds: dict[str, Any] = {}
    for completion, column in zip(completions, answer, strict=True):
        text, gold = completion_text(completion).strip(), str(column).rpartition("####")[2].strip()
        if gold not in golds:
            golds[gold] = _parsed_gold(gold)
        is_right = text == gold or verify(golds[gold], _parsed(text), timeout_seconds=None)
        rewards.append(float(is_right) if golds[gold] else None)
    return rewards


def _parsed_gold(gold: str) -> Any:
    """A gold is LaTeX without delimiters (`2\\sqrt{3}`), of which a bare parse finds no more than a number; or it has its own."""
    return (not _DELIMITED.search(gold) and _parsed(f"${gold}$")) or _parsed(gold)


def _parsed(text: str) -> Any:
    from math_verify import parse

    return parse(text, parsing_timeout=None)


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
