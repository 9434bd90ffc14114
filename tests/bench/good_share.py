"""The reward of the comparisons with other trainers: the share of good characters, which are the first 64 of 127.

A random model can learn this rule from any prompt. Its mean is the same for all lengths, so learning hardly changes the
length of completions. Both sides call this file, so it imports nothing.
"""

from typing import Any

CHARACTERS = "".join(map(chr, range(127)))
GOOD = frozenset(CHARACTERS[:64])
BY_CHANCE = len(GOOD) / len(CHARACTERS)


def good_share(completions: list[str], **columns: Any) -> list[float]:
    """Return the rewards. An empty completion gets the chance level; otherwise the model would unlearn early ends."""
    return [sum(character in GOOD for character in text) / len(text) if text else BY_CHANCE for text in completions]


def even_share(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of tokens with an even id: one half at first, whatever the vocabulary."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]
