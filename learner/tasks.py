"""Built-in tasks: rows of prompts made from a seed, for a first run that needs no file and no network.

A task stands where a data file would stand: its rows go into `learner.data`. Invariant: the same name, number, seed and
options give the same rows, and no prompt comes twice.
"""

import random
from collections.abc import Callable
from typing import Any

from protocol.errors import DataError

MAX_DIGITS = 18
"""What random.sample can draw from."""


def make_rows(task: str, num_prompts: int, seed: int, **options: Any) -> list[dict[str, Any]]:
    """Return the rows of a built-in task.

    Raises DataError if there is no such task or it has fewer distinct prompts.
    """
    if task not in TASKS:
        raise DataError(
            f"learner.data.task = {task!r} is not a built-in task; known are: {', '.join(sorted(TASKS))}. "
            "For data of your own set learner.data.path or learner.data.dataset instead"
        )
    return TASKS[task](num_prompts, seed, **options)


def reverse(num_prompts: int, seed: int, *, num_digits: int = 8) -> list[dict[str, Any]]:
    """Reverse a string of digits: {"prompt": "48213907>", "answer": "70931284"}."""
    if num_digits > MAX_DIGITS:
        raise DataError(
            f"task reverse with num_digits = {num_digits}: at most {MAX_DIGITS}; lower learner.data.num_digits"
        )
    if num_digits < 1 or num_prompts > 10**num_digits:
        raise DataError(
            f"task reverse with num_digits = {num_digits} has {10 ** max(num_digits, 0)} distinct prompts, "
            f"num_prompts = {num_prompts} were asked for; raise learner.data.num_digits or lower learner.data.num_prompts"
        )
    numbers = random.Random(seed).sample(range(10**num_digits), num_prompts)
    digits = [f"{number:0{num_digits}d}" for number in numbers]
    return [{"prompt": f"{text}>", "answer": text[::-1]} for text in digits]


TASKS: dict[str, Callable[..., list[dict[str, Any]]]] = {"reverse": reverse}
