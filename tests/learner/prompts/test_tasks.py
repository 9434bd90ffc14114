"""Built-in tasks: deterministic rows without duplicate prompts."""

import operator
import re
from collections.abc import Callable

import pytest

from learner.prompts.tasks import FACTORS, NUM_PROMPTS, SUMMANDS, TASKS, make_rows
from protocol.builtin_models.tiny_digits import CHARACTERS
from protocol.errors import DataError


def digits_of_sum(prompt: str, sign: str) -> str:
    numbers = prompt[:-1].split(sign)
    return str(sum(map(int, numbers)))


@pytest.mark.parametrize(
    ("task", "prompt", "answer"),
    [
        ("reverse", r"\d{8}>", lambda prompt: prompt[-2::-1]),
        ("sort", r"\d{4}>", lambda prompt: "".join(sorted(prompt[:-1]))),
        ("arithmetic", r"\d\d\+\d\d=", lambda prompt: digits_of_sum(prompt, "+").zfill(3)[::-1]),
        ("calculator", r"\d\d,\d\d>", lambda prompt: digits_of_sum(prompt, ",")),
    ],
)  # fmt: skip
def test_each_prompt_occurs_once_with_the_correct_answer(task: str, prompt: str, answer: Callable[[str], str]):
    rows = make_rows(task, 1600, seed=3)
    assert len({row["prompt"] for row in rows}) == 1600
    for row in rows:
        assert re.fullmatch(prompt, row["prompt"]) and row["answer"] == answer(row["prompt"])
        if task == "calculator":
            assert row["call"] == row["prompt"].replace(",", "+").replace(">", "=") and len(row["answer"]) == 2


@pytest.mark.parametrize(
    ("task", "count", "most"),
    [("reverse", 10, 18), ("sort", 10, 18), ("arithmetic", 100, 9), ("calculator", 16, 9)],
)
def test_rows_depend_only_on_the_seed_and_use_the_characters_of_the_tiny_model(task: str, count: int, most: int):
    rows = make_rows(task, 50, seed=3)
    assert rows == make_rows(task, 50, seed=3) != make_rows(task, 50, seed=4)
    assert set("".join(row["prompt"] + row["answer"] for row in rows)) <= set(CHARACTERS)
    assert len({row["prompt"] for row in make_rows(task, count, seed=0, num_digits=1)}) == count
    with pytest.raises(
        DataError, match=rf"num_prompts = {count + 1} is more than the {count} distinct .* with num_digits = 1; raise"
    ):
        make_rows(task, count + 1, seed=0, num_digits=1)
    assert len(make_rows(task, 2, seed=0, num_digits=most)) == 2
    with pytest.raises(DataError, match=rf"num_digits = {most + 1} is more than the {most} of task {task}"):
        make_rows(task, 2, seed=0, num_digits=most + 1)


def test_an_unknown_task_is_an_error_that_lists_the_known():
    with pytest.raises(DataError, match=f"'revers' is not a built-in task; use one of: {', '.join(sorted(TASKS))}"):
        make_rows("revers", 1, seed=0)


def test_guess_has_one_digit_secrets_and_prompts_without_information():
    rows = make_rows("guess", 200, seed=3)
    assert {row["prompt"] for row in rows} == {"="}
    assert {row["secret"] for row in rows} == set(range(10))
    with pytest.raises(DataError, match="num_digits = 2 does not fit task guess, whose secrets have one digit"):
        make_rows("guess", 1, seed=3, num_digits=2)


@pytest.mark.parametrize(
    ("task", "numbers", "num_pairs"), [("sums", SUMMANDS, [320, 80]), ("products", FACTORS, [6480, 1620])]
)
def test_held_out_rows_share_no_pair_of_numbers_with_training_rows_for_any_seed(
    task: str, numbers: range, num_pairs: list[int]
):
    training, held_out = make_rows(task, None, seed=3), make_rows(f"{task}_held_out", None, seed=4)
    pairs = [{numbers_of(row) for row in rows} for rows in (training, held_out)]
    assert [len(rows) for rows in (training, held_out)] == [len(one) for one in pairs]
    assert [len(rows) for rows in (training, held_out)] == [NUM_PROMPTS[task], NUM_PROMPTS[f"{task}_held_out"]]
    assert not pairs[0] & {pair for a, b in pairs[1] for pair in ((a, b), (b, a))}
    assert {a for a, _ in pairs[0]} == {b for _, b in pairs[0]} == set(numbers)
    right = operator.add if task == "sums" else operator.mul
    assert all(row["answer"] == right(*numbers_of(row)) for row in training + held_out)
    for name, count in zip((task, f"{task}_held_out"), num_pairs, strict=True):
        assert len(make_rows(name, count, seed=0)) == count
        with pytest.raises(DataError, match=f"num_prompts = 9999 is more than the {count} distinct prompts of task"):
            make_rows(name, 9999, seed=0)
        with pytest.raises(DataError, match="num_digits = 2 is not an option of task"):
            make_rows(name, 10, seed=0, num_digits=2)


def numbers_of(row):
    message = row["prompt"][-1]
    _, _, a, _, b, *_ = message["content"].replace("?", "").split()
    return int(a), int(b)
