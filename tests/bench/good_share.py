"""The reward of the comparisons with other trainers: the share of good characters, the first 64 of 127.

A rule that a random model can follow to some degree, learnt from any prompt, and the same on average for completions of every
length: what is learnt hardly moves how long completions are. Both sides call this file, so it imports nothing.
"""

from typing import Any

CHARACTERS = "".join(map(chr, range(127)))
GOOD = frozenset(CHARACTERS[:64])
BY_CHANCE = len(GOOD) / len(CHARACTERS)


def good_share(completions: list[str], **columns: Any) -> list[float]:
    """An empty completion has what chance gives, else ends at once would be unlearnt."""
    return [sum(character in GOOD for character in text) / len(text) if text else BY_CHANCE for text in completions]


def even_share(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """The share of tokens with an even id: one half at first, whatever the vocabulary."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]
