"""Decode a policy's turns as text, with uniform marks around reasoning.

Imports only the standard library: rewards are also read where Slipstream's packages are not installed.

Invariant: reasoning that a model family marks in its own way is put between <think> and </think>.
"""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENS_REASONING, CLOSES_REASONING = "<think>", "</think>"
END_TOKENS = 8
"""Number of last tokens that hold `<think>` and its line break, even if split into several tokens."""
CHANNEL, ANSWER = "<|channel|>", "final"
"""Marks of gpt-oss, which writes all text into channels.

    <|channel|>analysis<|message|>Two<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>
"""
_CHANNEL_TEXTS = re.compile(
    r"<\|channel\|>(\w*)(?:(?!<\|channel\|>).)*?<\|message\|>(.*?)(<\|(?:end|return|call|start)\|>|$)", re.DOTALL
)


def opening_of(tokenizer: "PreTrainedTokenizerBase", prompt: list[int]) -> str:
    """Return "<think>" if a prompt ends with it, so that the turn starts as reasoning, else ""."""
    (end,) = tokenizer.batch_decode([prompt[-END_TOKENS:]], skip_special_tokens=False)
    return OPENS_REASONING if end.rstrip().endswith(OPENS_REASONING) else ""


def texts_of(
    tokenizer: "PreTrainedTokenizerBase", token_ids: list[list[int]], skip_special_tokens: bool = True
) -> list[str]:
    """Return turns as people and reward functions read them.

    `skip_special_tokens = False` returns the turns unchanged.
    """
    texts: list[str] = tokenizer.batch_decode(token_ids, skip_special_tokens=skip_special_tokens)
    if not skip_special_tokens or CHANNEL not in getattr(tokenizer, "added_tokens_encoder", {}):
        return texts
    marked = tokenizer.batch_decode(token_ids, skip_special_tokens=False)
    return [_without_channels(one) if CHANNEL in one else text for one, text in zip(marked, texts, strict=True)]


def _without_channels(text: str) -> str:
    return "".join(
        content if channel == ANSWER else f"{OPENS_REASONING}{content}{CLOSES_REASONING if end else ''}"
        for channel, content, end in _CHANNEL_TEXTS.findall(text)
    )
