"""Built-in tasks: rows of prompts made from a seed, for a first run without files or network.

A task replaces a data file: its rows go into `learner.data`.

Invariant: the same name, number of prompts, seed and options give the same rows. No prompt occurs twice,
except in `guess`. `sums` and `products` never contain a held-out row, whatever the seed.
"""

import random
from collections.abc import Callable
from typing import Any

from protocol.errors import DataError

DEFAULT_NUM_PROMPTS = 4096
MAX_DIGITS = 18
"""Maximum number of digits that `random.sample` can draw from."""


def make_rows(task: str, num_prompts: int | None, seed: int, **options: Any) -> list[dict[str, Any]]:
    """Return the rows of a built-in task.

    `num_prompts` = None selects the default of the task, which is at most 4096.

    Raises:
        DataError: The task does not exist, or has fewer distinct prompts.
    """
    if task not in TASKS:
        raise DataError(
            f"learner.data.task = {task!r} is not a built-in task; use one of: {', '.join(sorted(TASKS))}. "
            "For your own data, set learner.data.path or learner.data.dataset instead"
        )
    return TASKS[task](num_prompts or default_num_prompts(task), seed, **options)


def make_untrained_rows(
    task: str, num_prompts: int | None, seed: int, num_trained: int | None, **options: Any
) -> list[dict[str, Any]]:
    """Return rows of a task without the prompts of the `num_trained` rows that `make_rows` returns.

    Tasks with a held-out counterpart may return any of their rows, and so may `guess`, whose prompts are all alike.

    Raises:
        DataError: The task has too few distinct prompts.
    """
    if task not in UNDIVIDED_TASKS:
        return make_rows(task, num_prompts, seed, **options)
    num_prompts, num_trained = num_prompts or default_num_prompts(task), num_trained or default_num_prompts(task)
    trained = {row["prompt"] for row in make_rows(task, num_trained, seed, **options)}
    try:
        rows = make_rows(task, num_trained + num_prompts, seed, **options)
    except DataError as error:
        raise DataError(
            f"task {task} has fewer than {num_trained + num_prompts} distinct prompts: {num_trained} that the run "
            f"trains on, and {num_prompts} others for its evaluation. Raise learner.data.num_digits, or lower "
            "num_prompts of one of them"
        ) from error
    return [row for row in rows if row["prompt"] not in trained][:num_prompts]


def default_num_prompts(task: str) -> int:
    return NUM_PROMPTS.get(task, DEFAULT_NUM_PROMPTS)


def reverse(num_prompts: int, seed: int, *, num_digits: int = 8) -> list[dict[str, Any]]:
    """Reverse a string of digits: {"prompt": "48213907>", "answer": "70931284"}."""
    texts = _digit_strings("reverse", num_prompts, seed, num_digits)
    return [{"prompt": f"{text}>", "answer": text[::-1]} for text in texts]


def sort(num_prompts: int, seed: int, *, num_digits: int = 4) -> list[dict[str, Any]]:
    """Sort a string of digits: {"prompt": "4821>", "answer": "1248"}."""
    texts = _digit_strings("sort", num_prompts, seed, num_digits)
    return [{"prompt": f"{text}>", "answer": "".join(sorted(text))} for text in texts]


def arithmetic(num_prompts: int, seed: int, *, num_digits: int = 2) -> list[dict[str, Any]]:
    """Add two numbers, ones digit first: {"prompt": "37+85=", "answer": "221"}.

    In this order, each digit depends only on what precedes it, so a tiny model can learn the task.
    """
    texts = _digit_strings("arithmetic", num_prompts, seed, num_digits, numbers_per_prompt=2)
    pairs = [(text[:num_digits], text[num_digits:]) for text in texts]
    return [
        {"prompt": f"{left}+{right}=", "answer": f"{int(left) + int(right):0{num_digits + 1}d}"[::-1]}
        for left, right in pairs
    ]


def guess(num_prompts: int, seed: int, *, num_digits: int = 1) -> list[dict[str, Any]]:
    """Guess a digit in the environment `guess`: {"prompt": "=", "secret": 7}.

    All prompts are the same.
    """
    if num_digits != 1:
        raise DataError(
            f"learner.data.num_digits = {num_digits} does not fit task guess, whose secrets have one digit; set it to 1"
        )
    draw = random.Random(seed)
    return [{"prompt": "=", "secret": draw.randrange(10)} for _ in range(num_prompts)]


def calculator(num_prompts: int, seed: int, *, num_digits: int = 2) -> list[dict[str, Any]]:
    """Add two numbers with the environment `calculator`.

    Example: {"prompt": "37,45>", "call": "37+45=", "answer": "82"}. The sum has no extra digit.
    """
    low, high = 10 ** max(num_digits - 1, 0), 5 * 10 ** max(num_digits - 1, 0)
    num_pairs = (high - low) ** 2
    _check_size("calculator", num_prompts, num_digits, MAX_DIGITS // 2, num_pairs)
    pairs = [divmod(pair, high - low) for pair in random.Random(seed).sample(range(num_pairs), num_prompts)]
    return [
        {
            "prompt": f"{low + left},{low + right}>",
            "call": f"{low + left}+{low + right}=",
            "answer": str(2 * low + left + right),
        }
        for left, right in pairs
    ]


SUMMANDS, FACTORS = range(1, 21), range(10, 100)
"""Ranges of both numbers of a sum, and of a product. A fifth of the pairs is held out."""
NUM_PROMPTS = {"sums": 320, "sums_held_out": 80, "products": DEFAULT_NUM_PROMPTS, "products_held_out": 80}
WITH_CALCULATOR = [
    {"role": "user", "content": "What is 12 times 34? Let the calculator say it."},
    {"role": "assistant", "content": "CALC(12*34)"},
    {"role": "user", "content": "408"},
    {"role": "assistant", "content": "408"},
]
"""Example that precedes each question. Without it, the model does not call the calculator."""


def sums(num_prompts: int, seed: int, *, num_digits: int | None = None) -> list[dict[str, Any]]:
    """Add two small numbers in a conversation, for a pretrained model.

    Example: {"answer": 19, "prompt": [{"role": "user", …}]}.
    """
    return _sum_rows("sums", num_prompts, seed, num_digits, is_held_out=False)


def sums_held_out(num_prompts: int, seed: int, *, num_digits: int | None = None) -> list[dict[str, Any]]:
    """Return the sums that `sums` never contains, for evaluation."""
    return _sum_rows("sums_held_out", num_prompts, seed, num_digits, is_held_out=True)


def products(num_prompts: int, seed: int, *, num_digits: int | None = None) -> list[dict[str, Any]]:
    """Multiply two numbers by asking a calculator in words.

    The agent is deploy/agents/calculator_in_words.py.
    """
    return _product_rows("products", num_prompts, seed, num_digits, is_held_out=False)


def products_held_out(num_prompts: int, seed: int, *, num_digits: int | None = None) -> list[dict[str, Any]]:
    """Return the products that `products` never contains, for evaluation."""
    return _product_rows("products_held_out", num_prompts, seed, num_digits, is_held_out=True)


def _sum_rows(
    task: str, num_prompts: int, seed: int, num_digits: int | None, *, is_held_out: bool
) -> list[dict[str, Any]]:
    pairs = _pairs(task, SUMMANDS, num_prompts, seed, num_digits, is_held_out=is_held_out)
    return [
        {"prompt": [_user(f"What is {a} plus {b}? Answer with the number only.")], "answer": a + b} for a, b in pairs
    ]


def _product_rows(
    task: str, num_prompts: int, seed: int, num_digits: int | None, *, is_held_out: bool
) -> list[dict[str, Any]]:
    pairs = _pairs(task, FACTORS, num_prompts, seed, num_digits, is_held_out=is_held_out)
    question = "What is {} times {}? Let the calculator say it."
    return [{"prompt": [*WITH_CALCULATOR, _user(question.format(a, b))], "answer": a * b} for a, b in pairs]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _pairs(
    task: str, numbers: range, num_prompts: int, seed: int, num_digits: int | None, *, is_held_out: bool
) -> list[tuple[int, int]]:
    if num_digits is not None:
        raise DataError(f"learner.data.num_digits = {num_digits} is not an option of task {task}; remove it")
    # The split ignores the seed and keeps (a, b) with (b, a). Every number occurs on both sides of it.
    pairs = [(a, b) for a in numbers for b in numbers if ((a - b) % 5 == 0) == is_held_out]
    if num_prompts > len(pairs):
        raise DataError(
            f"learner.data.num_prompts = {num_prompts} is more than the {len(pairs)} distinct prompts of task {task}; "
            "lower it"
        )
    return random.Random(seed).sample(pairs, num_prompts)


TASKS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "arithmetic": arithmetic, "calculator": calculator, "guess": guess, "products": products,
    "products_held_out": products_held_out,
    "reverse": reverse, "sort": sort, "sums": sums, "sums_held_out": sums_held_out,
}  # fmt: skip

UNDIVIDED_TASKS = frozenset({"arithmetic", "calculator", "reverse", "sort"})
"""Tasks with distinct prompts and without a held-out counterpart."""


def _digit_strings(
    task: str, num_prompts: int, seed: int, num_digits: int, *, numbers_per_prompt: int = 1
) -> list[str]:
    """Draw distinct digit strings, each as long as the numbers of one prompt together."""
    length = numbers_per_prompt * num_digits
    _check_size(task, num_prompts, num_digits, MAX_DIGITS // numbers_per_prompt, 10 ** max(length, 0))
    return [f"{number:0{length}d}" for number in random.Random(seed).sample(range(10**length), num_prompts)]


def _check_size(task: str, num_prompts: int, num_digits: int, most: int, num_distinct: int) -> None:
    if num_digits > most:
        raise DataError(f"learner.data.num_digits = {num_digits} is more than the {most} of task {task}; lower it")
    if num_digits < 1 or num_prompts > num_distinct:
        raise DataError(
            f"learner.data.num_prompts = {num_prompts} is more than the {num_distinct} distinct prompts of task "
            f"{task} with num_digits = {num_digits}; raise learner.data.num_digits or lower learner.data.num_prompts"
        )
