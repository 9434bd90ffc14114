"""What a completion is worth. Columns of prompts.jsonl come by name; **row takes those that are not named here."""


def places_right(completions, answer, **row):
    """Share of the answer's characters that are in their places, and of the end as one more."""
    return [
        sum(a == b for a, b in zip(said.ljust(len(right) + 1), f"{right} ", strict=False)) / (len(right) + 1)
        for said, right in zip(completions, answer, strict=True)
    ]
