"""Extract a completion's answer, and the gold answers from its row, as text.

    completion ─▶ the assistant's last message ─▶ text after its reasoning ─▶ within <answer> ─▶ answer_of
    `answer`, of any JSON type ─────────────────────────────────────────────▶ golds_of, each of which is right

The built-in reward functions use these pure helpers.
Invariant: reasoning that never ends yields no answer, and tool output never counts as an answer.
"""

import json
import re
import string
from decimal import Decimal
from typing import Any

from learner.prompts.reasoning import CLOSES_REASONING, OPENS_REASONING

_ANSWER_TAG = re.compile(r"```.*?(?:```|$)|`[^`\n]*`|(?<![\"'])<answer>|</answer>(?![\"'])", re.DOTALL)
"""Tag around an answer, or code, whose tags are its own."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_][^\W\d_'’.\-]*(?:[ ,]+[^\W\d_][^\W\d_'’.\-]*)*")
_MARK = re.compile(r"####|\banswer\s+is\b(?<!\bthis answer is(?=\s+(?:correct|right)\b))|\banswer\s*:", re.IGNORECASE)
"""Mark of a conclusion. "This answer is correct" only confirms an earlier one."""
_NUMBERED_HEADING = re.compile(
    r"^[ \t]*#{4,6}[ \t*_]*(?:(?:step|part|case)[ \t]+\d+\b|\d{1,2}[.)](?=[ \t*_]+[^\W\d_][^\n]*\n\s*\S))[.:)]*",
    re.IGNORECASE | re.MULTILINE,
)
"""Beginning of a Markdown heading, such as "#### Step 2:". "#### 2. Result" is one only if text follows the line."""
_ANSWER_HEADING = re.compile(
    r"^[ \t]*#{4,6}[ \t*_]*(?:the[ \t]+)?(?:final[ \t]+)?answer[ \t*_:]*\n\s*", re.IGNORECASE | re.MULTILINE
)
_HEADING_OF_WORDS = re.compile(r"^[ \t]*#{4,6}[ \t*_]*(?=[^\W\d_]{3,}[^\d\n$\\=]*\n\s*\S)", re.MULTILINE)
_HEDGED = re.compile(r"\d\S*\s+or\s+\S*\d", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?:(?<![\w.)])(?:-|(?<![\d)]\s)-\s)\$?)?"  # sign of "-5", "- 5" and "-$5", but not of "7-5", "7 - 5"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][+-]?\d{1,4}(?!\w))?"
)
_MINUS = "\N{MINUS SIGN}"
_LATEX_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,\\!)(?=\d)")
_DECORATION = str.maketrans(dict.fromkeys("*_`\"'$\\", "") | dict.fromkeys("()[]{}", "."))
_REASON = r"because|since|as|which|is\s+(?:the\s+)?(?:correct|right|answer)"
_CHOICE = re.compile(
    r"[\s.]*(?:(?i:option|choice|answer)[\s.:]+)?"
    rf"(?:([A-Z])(?=\s*(?:$|[.:,;/&–—-]|(?:or|and|{_REASON})\b))|([a-z])(?=\s*(?:$|[.:](?!\w\b)|(?:{_REASON})\b)))"
    r"(?![\s.]*is\s+(?:not|wrong|incorrect|false)\b)"
)
"""Letter that stands alone, is not an article and is not rejected.

It matches "B", "Option B", "B. Paris", "b) Paris" and "B because", but not "A dog", "a dog" and "e.g.".
"""
_SECOND_CHOICE = re.compile(
    r"[\s.,]*(?:or\b|and\b|[/&,])[\s.]*(?:(?!I\s+[a-z])[A-Z](?!\w)|[a-z](?=\s*(?:$|[.:,;]))(?![.:]\w\b))"
)
_FENCE = re.compile(r"```[ \t]*\w*[ \t]*\n(.*?)\n?```", re.DOTALL)
_MIXED = re.compile(r"(?<![\w.,/^\\{])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.,/])")

_TIME = re.compile(
    r"(?<![\w:.,/^*+{(-])((?:[01]?\d|2[0-4])(?::[0-5]\d){1,2})(?![\d:/^*!+]|\.\d)(?:\s*([ap])\.?\s?m\b)?", re.IGNORECASE
)
_NO_CHOICE = re.compile(r"\d|\b(?:not|or|between|before|after)\b", re.IGNORECASE)
"""Numbers and words that disqualify a time answer when they remain next to the time."""


def completion_text(completion: Any, *, opens_reasoning: bool = False) -> str:
    """Return the text of the assistant's last message, reasoning included.

    A plain-text completion counts as that message.
    """
    if isinstance(completion, str):
        return OPENS_REASONING + completion if opens_reasoning else completion
    last: dict[str, Any] = next(
        (message for message in reversed(completion) if message.get("role", "assistant") == "assistant"), {}
    )
    text, reasoning = _content(last.get("content")), last.get("reasoning_content")
    if reasoning:
        return f"{OPENS_REASONING}{reasoning}{CLOSES_REASONING}{text}"
    return OPENS_REASONING + text if opens_reasoning else text


def answer_of(completion: Any, *, opens_reasoning: bool = False) -> str:
    """Return the text after the reasoning, or "" if the reasoning never ends.

    Without reasoning, return the whole text. If it holds `<answer>…</answer>`, only what is between the last
    tags is the answer. `opens_reasoning`: the prompt ends with `<think>`, so the completion starts inside the
    reasoning.
    """
    _, has_reasoned, answer = completion_text(completion, opens_reasoning=opens_reasoning).rpartition(CLOSES_REASONING)
    if OPENS_REASONING in answer:
        return ""
    return _without_tags(answer.strip() if has_reasoned else answer)


def golds_of(gold: Any) -> list[str]:
    """Return the right answers as texts. Items of a list are alternatives.

    None, an empty text and an empty list give no answers: nothing is known.
    """
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
    text = _without_tags(str(gold))
    return [text] if text.strip() else []


def _without_tags(text: str) -> str:
    """Return what is between the last `<answer>`, which the prompt may have opened, and its `</answer>`.

    Without `</answer>`, return the whole text.
    """
    tags = list(_ANSWER_TAG.finditer(text))
    ends = [tag.start() for tag in tags if tag[0] == "</answer>"]
    if not ends:
        return text
    starts = [tag.end() for tag in tags if tag[0] == "<answer>" and tag.end() <= ends[-1]]
    return text[starts[-1] if starts else 0 : ends[-1]].strip()


def _content(content: Any) -> str:
    """Return the content of a message as text.

    The content is a text, a list of parts, or None if the message only calls tools.
    """
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _plainly(number: float) -> str:
    """Format a number without an exponent: 1e-05 as 0.00001, 42.0 as 42.

    LaTeX reads the e of an exponent as Euler's number.
    """
    decimal = Decimal(repr(number))
    if not decimal.is_finite():
        return repr(number)
    text = format(decimal, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}`, or None if there is none.

    A box that never ends gives "".
    """
    begins = [match.end() for match in _BOX.finditer(text)]
    if not begins:
        return None
    depth = 1
    for i in range(begins[-1], len(text)):
        is_escaped = i > 0 and text[i - 1] == "\\"
        depth += 0 if is_escaped else {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begins[-1] : i]
    return ""


def short_answer(text: str) -> str:
    """Return the answer that a whole text gives.

    This is its last box, else its last marked answer, else all text after its reasoning.
    """
    answer = answer_of(text)
    box, marked = last_box(answer), _conclusions(answer)
    return (answer if box is None and not marked else marked[-1] if box is None else box).strip(" .*$\n")


def last_number_in(text: str) -> Decimal | None:
    """Return the first number after the last `####`, or None if there is none.

    Without `####`, return the last number of the text.
    """
    is_marked, rest = after_mark(_with_plain_signs(text))
    numbers = _NUMBER.findall(rest)
    return _value(numbers[0 if is_marked else -1]) if numbers else None


def after_mark(text: str) -> tuple[bool, str]:
    """Return whether `####` marks a number or a formula in a text, and what follows the last such mark.

    Without a mark, return the text without the marks and numbers of its headings.
    """
    _, mark, rest = _HEADING_OF_WORDS.sub("", _without_headings(text)).rpartition("####")
    return bool(mark), rest


def as_number(text: str) -> Decimal | None:
    """Parse a whole text as one number, or return None."""
    number = _with_plain_signs(text.strip())
    return _value(number) if _NUMBER.fullmatch(number) else None


def _with_plain_signs(text: str) -> str:
    r"""Write the minus sign as "-", and LaTeX's `1{,}234` and `1,\!234` as 1,234."""
    return _LATEX_SEPARATOR.sub(",", text.replace(_MINUS, "-"))


def _value(number: str) -> Decimal:
    return Decimal(re.sub(r"[,$\s]", "", number))


def num_boxes(text: str) -> int:
    return len(_BOX.findall(text))


def is_words(gold: str) -> bool:
    r"""Return whether a gold is made of words, such as "Paris", "no" or `\text{not enough}`.

    A product of variables, such as `ab`, is not.
    """
    words = _without_commands(gold)
    return _WORDS.fullmatch(words) is not None and (max(map(len, words.split())) > 2 or words.casefold() == "no")


def is_time(gold: str) -> bool:
    """Return whether a gold is a time of day or a duration.

    Examples: "3:30", "3:30 p.m.", "1:02:03". A ratio may look the same.
    """
    return _TIME.fullmatch(_spoken(gold)) is not None


def same_time(text: str, gold: str) -> bool:
    """Compare two times by the clock, so that 3:30 p.m. equals 15:30.

    A gold without a.m. or p.m. matches both. A text that holds another number or leaves a choice does not
    match.
    """
    text = _spoken(text)
    times, right = _TIME.findall(text), _TIME.findall(_spoken(gold))
    if len(times) != 1 or _NO_CHOICE.search(_TIME.sub("", text)):
        return False
    return _seconds(*times[0]) == _seconds(*right[0]) or (
        not right[0][1] and _seconds(times[0][0]) == _seconds(right[0][0])
    )


def _spoken(text: str) -> str:
    """Remove LaTeX spacing, `{:}`, emphasis and text commands."""
    for mark, plain in (("\\,", " "), ("\\;", " "), ("~", " "), ("{:}", ":"), ("*", "")):
        text = text.replace(mark, plain)
    return _without_commands(text)


def _seconds(clock: str, half: str = "") -> int:
    hours, minutes, *seconds = map(int, clock.split(":"))
    if half:
        hours = hours % 12 + (12 if half in "pP" else 0)
    return (hours * 60 + minutes) * 60 + (seconds[0] if seconds else 0)


def concluded(text: str) -> str:
    """Return the final answer of a text that has no box.

    This is the text after the last `####` or "answer is", else the last line.
    """
    marked = _conclusions(text)
    return (marked[-1] if marked else text.rpartition("\n")[2]).strip()


def _conclusions(text: str) -> list[str]:
    """Return what follows each mark, up to the end of its line or the next mark."""
    parts = _MARK.split(_without_headings(text))[1:]
    lines = (part.lstrip(string.whitespace + ":*").partition("\n")[0] for part in parts)
    return [line for line in lines if line]


def _without_headings(text: str) -> str:
    """Remove the marks and numbers of numbered Markdown headings. "#### Final answer" marks the next line."""
    return _NUMBERED_HEADING.sub("", _ANSWER_HEADING.sub("#### ", text))


def chosen(text: str) -> str | None:
    r"""Return the letter that a text chooses, or None.

    The letter is in the last box, else after "answer is" or "####", else in the last line. The result is None
    if there is no letter or a second choice follows it.
    """
    box = last_box(text)
    answer = _without_commands(concluded(text) if box is None else box).translate(_DECORATION)
    match = _CHOICE.match(answer)
    if match is None or _SECOND_CHOICE.match(answer, match.end()):
        return None
    return str(match[1] or match[2]).upper()


def without_fence(text: str) -> str:
    """Return the content of a code block that is the whole text, else the text."""
    match = _FENCE.fullmatch(text.strip())
    return match[1] if match else text


def is_hedged(text: str) -> bool:
    """Return whether the final answer offers one number or another."""
    return _HEDGED.search(concluded(text)) is not None


def same_words(one: str, other: str) -> bool:
    """Compare texts without case, spacing, outer punctuation and LaTeX text commands."""
    return _normalised(one) == _normalised(other)


def with_mixed_numbers(text: str) -> str:
    r"""Write `11 5/6` as `11\frac{5}{6}`, which is parsed as one number."""
    return _MIXED.sub(r"\1\\frac{\2}{\3}", text)


def _without_commands(text: str) -> str:
    return _TEXT_COMMAND.sub(r"\1", text).replace("\\ ", " ").strip(" $.\n")


def _normalised(text: str) -> str:
    return " ".join(_without_commands(text).casefold().split()).strip(" .,;:!?()[]{}\"'`*$")
