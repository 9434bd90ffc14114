"""What a completion answers, and what its `answer` column says is right, as text. Read by the built-in rewards.

    completion ─▶ the assistant's last message ─▶ what follows its reasoning ─▶ answer_of
    `answer`, of any JSON type ─────────────────────────────────────────────▶ golds_of, each of which is right

Invariant: reasoning that never ends answers nothing, and what a tool has said is nobody's answer. Pure.
"""

import json
import re
from decimal import Decimal
from typing import Any

from learner.prompts.reasoning import CLOSES_REASONING, OPENS_REASONING

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_][^\W\d_'’.\-]*(?:[ ,]+[^\W\d_][^\W\d_'’.\-]*)*")
_CONCLUDES = re.compile(r"(?:####|\banswer\s+is\b|\banswer\s*:)[\s:*]*([^\n]+)", re.IGNORECASE)
_HEDGED = re.compile(r"\d\S*\s+or\s+\S*\d", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?:(?<![\w.)])(?:-|(?<![\d)]\s)-\s)\$?)?"  # the sign of "-5", "- 5" and "-$5", but not of "7-5" and "7 - 5"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][+-]?\d{1,4}(?!\w))?"
)
_MINUS = "\N{MINUS SIGN}"
_DECORATION = str.maketrans(dict.fromkeys("*_`\"'$\\", "") | dict.fromkeys("()[]{}", "."))
_CHOICE = re.compile(
    r"[\s.]*(?:(?i:option|choice|answer)[\s.:]+)?([A-Z]|[a-z](?=[\s.]*$))"
    r"(?=\s*(?:$|[.:,;/&–—-]|(?:or|and|because|since|as|which|is\s+(?:the\s+)?(?:correct|right|answer))\b))"
)
"""A letter that stands alone, and no article: "B", "Option B", "B. Paris", "B because", but not "A dog"."""
_SECOND_CHOICE = re.compile(r"[\s.,]*(?:or\b|and\b|[/&,])[\s.]*(?!I\s+[a-z])[A-Z](?!\w)")
_FENCE = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)\n?```", re.DOTALL)
_MIXED = re.compile(r"(?<![\w.,/^\\{])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.,/])")

_TIME = re.compile(
    r"(?<![\w:.,/^*+{(-])((?:[01]?\d|2[0-4])(?::[0-5]\d){1,2})(?![\d:/^*!+]|\.\d)(?:\s*([ap])\.?\s?m\b)?", re.IGNORECASE
)
_NO_CHOICE = re.compile(r"\d|\b(?:not|or|between|before|after)\b", re.IGNORECASE)
"""An answer that is a time contains no other number and none of these words."""


def completion_text(completion: Any, *, opens_reasoning: bool = False) -> str:
    """Return what the assistant said last: the completion itself, or its last message of a conversational one, reasoning included."""
    if isinstance(completion, str):
        return OPENS_REASONING + completion if opens_reasoning else completion
    said: dict[str, Any] = next(
        (message for message in reversed(completion) if message.get("role", "assistant") == "assistant"), {}
    )
    text, reasoning = _content(said.get("content")), said.get("reasoning_content")
    if reasoning:
        return f"{OPENS_REASONING}{reasoning}{CLOSES_REASONING}{text}"
    return OPENS_REASONING + text if opens_reasoning else text


def answer_of(completion: Any, *, opens_reasoning: bool = False) -> str:
    """Return what follows the reasoning, or all where there is none; "" if the reasoning has not ended.

    `opens_reasoning`: the prompt ends with `<think>`, so that the completion begins within the reasoning.
    """
    _, has_reasoned, answer = completion_text(completion, opens_reasoning=opens_reasoning).rpartition(CLOSES_REASONING)
    if OPENS_REASONING in answer:
        return ""
    return answer.strip() if has_reasoned else answer


def golds_of(gold: Any) -> list[str]:
    """Return the texts that are right: those of a list are alternatives. None and an empty text or list: nothing is known."""
    match gold:
        case None:
            return []
        case bool():
            return [str(gold).lower()]
        case float():
            return list(dict.fromkeys((_plainly(gold), repr(gold))))
        case list() | tuple():
            return list(dict.fromkeys(text for one in gold for text in golds_of(one)))
        case dict():
            return [json.dumps(gold, sort_keys=True, ensure_ascii=False)]
    text = str(gold)
    return [text] if text.strip() else []


def _content(content: Any) -> str:
    """Of a message: a text, a list of parts, or None where there are only calls."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _plainly(number: float) -> str:
    """Without an exponent, which LaTeX reads as Euler's number: 1e-05 is 0.00001, 42.0 is 42."""
    decimal = Decimal(repr(number))
    if not decimal.is_finite():
        return repr(number)
    text = format(decimal, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def last_box(text: str) -> str | None:
    r"""Return what the last `\boxed{…}` holds: "" if it does not end, None if there is none."""
    begins = [match.end() for match in _BOX.finditer(text)]
    if not begins:
        return None
    depth = 1
    for place in range(begins[-1], len(text)):
        is_escaped = place > 0 and text[place - 1] == "\\"
        depth += 0 if is_escaped else {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begins[-1] : place]
    return ""


def short_answer(text: str) -> str:
    """Return what a whole text answers: its last box, or what it marks as its answer, or else all that follows its reasoning."""
    answer = answer_of(text)
    box, marked = last_box(answer), _CONCLUDES.findall(answer)
    return (answer if box is None and not marked else marked[-1] if box is None else box).strip(" .*$\n")


def last_number_in(text: str) -> Decimal | None:
    """Return the first number behind the last `####`, or the last one of a text without it; None if there is none."""
    _, mark, said = text.replace(_MINUS, "-").rpartition("####")
    numbers = _NUMBER.findall(said)
    return _value(numbers[0 if mark else -1]) if numbers else None


def as_number(text: str) -> Decimal | None:
    """Return the number that a whole text is; None if it is another text."""
    number = text.strip().replace(_MINUS, "-")
    return _value(number) if _NUMBER.fullmatch(number) else None


def _value(number: str) -> Decimal:
    return Decimal(re.sub(r"[,$\s]", "", number))


def num_boxes(text: str) -> int:
    return len(_BOX.findall(text))


def is_words(gold: str) -> bool:
    r"""Whether a gold is a word or several, "Paris" or `\text{not enough}`, and no product of variables, `ab`."""
    words = _without_commands(gold)
    return _WORDS.fullmatch(words) is not None and max(map(len, words.split())) > 2


def is_time(gold: str) -> bool:
    """Whether a gold is a time of day or a duration: "3:30", "3:30 p.m.", "1:02:03". A ratio may look like one."""
    return _TIME.fullmatch(_spoken(gold)) is not None


def same_time(text: str, gold: str) -> bool:
    """Compare by the clock, 3:30 p.m. and 15:30 alike; a gold without a half of the day does not ask for one.

    A text with another number, or that leaves a choice, is no answer.
    """
    text = _spoken(text)
    said, right = _TIME.findall(text), _TIME.findall(_spoken(gold))
    if len(said) != 1 or _NO_CHOICE.search(_TIME.sub("", text)):
        return False
    return _seconds(*said[0]) == _seconds(*right[0]) or (
        not right[0][1] and _seconds(said[0][0]) == _seconds(right[0][0])
    )


def _spoken(text: str) -> str:
    """Without LaTeX's spaces, braces and stress."""
    for mark, plain in (("\\,", " "), ("\\;", " "), ("~", " "), ("{:}", ":"), ("*", "")):
        text = text.replace(mark, plain)
    return _without_commands(text)


def _seconds(clock: str, half: str = "") -> int:
    hours, minutes, *seconds = map(int, clock.split(":"))
    if half:
        hours = hours % 12 + (12 if half in "pP" else 0)
    return (hours * 60 + minutes) * 60 + (seconds[0] if seconds else 0)


def concluded(text: str) -> str:
    """Return the last thing that a text without a box says is its answer: after `####` or "answer is", else its last line."""
    marked = _CONCLUDES.findall(text)
    return (marked[-1] if marked else text.rpartition("\n")[2]).strip()


def chosen(text: str) -> str | None:
    r"""Return the letter that a text chooses among several: in its last box, after "answer is" or "####", or in its last line; None if
    there is none, or another one beside it.
    """
    box = last_box(text)
    said = _without_commands(concluded(text) if box is None else box).translate(_DECORATION)
    match = _CHOICE.match(said)
    if match is None or _SECOND_CHOICE.match(said, match.end()):
        return None
    letter: str = match[1]
    return letter.upper()


def without_fence(text: str) -> str:
    """Return what a code block holds that is the whole text; other texts as they are."""
    match = _FENCE.fullmatch(text.strip())
    return match[1] if match else text


def is_hedged(text: str) -> bool:
    """Whether it names one number or another."""
    return _HEDGED.search(concluded(text)) is not None


def same_words(one: str, other: str) -> bool:
    """Compare without case, white space, punctuation at the ends and LaTeX's commands for text."""
    return _normalised(one) == _normalised(other)


def with_mixed_numbers(text: str) -> str:
    r"""Write `11 5/6` as `11\frac{5}{6}`, which is read as one number."""
    return _MIXED.sub(r"\1\\frac{\2}{\3}", text)


def _without_commands(text: str) -> str:
    return _TEXT_COMMAND.sub(r"\1", text).replace("\\ ", " ").strip(" $.\n")


def _normalised(text: str) -> str:
    return " ".join(_without_commands(text).casefold().split()).strip(" .,;:!?()[]{}\"'`*$")
