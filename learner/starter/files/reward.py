"""Reward function. Columns of prompts.jsonl are passed by name; **row takes the columns not named here."""


def places_right(completions, answer, **row):
    """Return the share of characters in the right place, counting the end as one more."""
    return [
        (sum(a == b for a, b in zip(text, right, strict=False)) + (len(text) == len(right))) / (len(right) + 1)
        for text, right in zip(completions, answer, strict=True)
    ]
