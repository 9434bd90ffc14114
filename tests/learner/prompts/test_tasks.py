"""Built-in tasks: deterministic rows, no prompt twice."""

import operator

import pytest

from learner.prompts.tasks import FACTORS, NUM_PROMPTS, SUMMANDS, TASKS, make_rows
from protocol.builtin_models.tiny_digits import CHARACTERS
from protocol.errors import DataError


def test_reverse_gives_digits_and_their_reverse():
    rows = make_rows("reverse", 100, seed=3)
    for row in rows:
        assert row["prompt"][-1] == ">" and row["prompt"][:-1].isdigit() and len(row["prompt"]) == 9
        assert row["answer"] == row["prompt"][-2::-1]
    assert len({row["prompt"] for row in rows}) == 100


def test_sort_gives_digits_and_the_same_in_order():
    for row in make_rows("sort", 100, seed=3):
        assert row["prompt"][-1] == ">" and list(row["answer"]) == sorted(row["prompt"][:-1])
    assert {"prompt": "4821>", "answer": "1248"} in make_rows("sort", 10_000, seed=3)


def test_arithmetic_gives_a_sum_and_its_digits_from_the_ones_on():
    rows = make_rows("arithmetic", 10_000, seed=3)
    for row in rows:
        left, right = row["prompt"].removesuffix("=").split("+")
        assert len(left) == len(right) == 2 and len(row["answer"]) == 3
        assert int(left) + int(right) == int(row["answer"][::-1])
    assert {"prompt": "37+85=", "answer": "221"} in rows and {"prompt": "07+01=", "answer": "800"} in rows


@pytest.mark.parametrize(
    ("task", "count", "most"),
    [("reverse", 10, 18), ("sort", 10, 18), ("arithmetic", 100, 9), ("calculator", 16, 9)],
)
def test_rows_depend_on_the_seed_alone_in_the_tiny_models_characters_and_are_as_many_as_there_are(
    task: str, count: int, most: int
):
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


def test_guess_has_secrets_of_one_digit_and_prompts_that_tell_nothing():
    rows = make_rows("guess", 200, seed=3)
    assert {row["prompt"] for row in rows} == {"="}
    assert {row["secret"] for row in rows} == set(range(10))
    with pytest.raises(DataError, match="num_digits = 2 does not fit task guess, whose secrets have one digit"):
        make_rows("guess", 1, seed=3, num_digits=2)


def test_calculator_gives_two_numbers_the_call_that_adds_them_and_a_sum_of_as_many_digits():
    rows = make_rows("calculator", 1600, seed=3)
    assert len({row["prompt"] for row in rows}) == 1600
    for row in rows:
        left, right = row["prompt"].removesuffix(">").split(",")
        assert row["call"] == f"{left}+{right}=" and row["answer"] == str(int(left) + int(right))
        assert len(left) == len(right) == len(row["answer"]) == 2


@pytest.mark.parametrize(("task", "numbers"), [("sums", SUMMANDS), ("products", FACTORS)])
def test_what_is_held_out_shares_no_pair_of_numbers_with_what_is_asked_whatever_the_seeds(task: str, numbers: range):
    asked, held_out = make_rows(task, None, seed=3), make_rows(f"{task}_held_out", None, seed=4)
    pairs = [{numbers_of(row) for row in rows} for rows in (asked, held_out)]
    assert [len(rows) for rows in (asked, held_out)] == [len(one) for one in pairs]
    assert [len(rows) for rows in (asked, held_out)] == [NUM_PROMPTS[task], NUM_PROMPTS[f"{task}_held_out"]]
    assert not pairs[0] & {pair for a, b in pairs[1] for pair in ((a, b), (b, a))}
    assert {a for a, _ in pairs[0]} == {b for _, b in pairs[0]} == set(numbers)
    right = operator.add if task == "sums" else operator.mul
    assert all(row["answer"] == right(*numbers_of(row)) for row in asked + held_out)


def numbers_of(row):
    message = row["prompt"][-1]
    _, _, a, _, b, *_ = message["content"].replace("?", "").split()
    return int(a), int(b)


@pytest.mark.parametrize(
    ("task", "num_pairs"), [("sums", 320), ("sums_held_out", 80), ("products", 6480), ("products_held_out", 1620)]
)
def test_more_pairs_than_there_are_and_digits_that_they_do_not_have_are_errors(task: str, num_pairs: int):
    assert len(make_rows(task, num_pairs, seed=0)) == num_pairs
    with pytest.raises(
        DataError, match=rf"num_prompts = 9999 is more than the {num_pairs} distinct prompts of task {task}"
    ):
        make_rows(task, 9999, seed=0)
    with pytest.raises(DataError, match=rf"num_digits = \d+ is not an option of task {task}"):
        make_rows(task, 10, seed=0, num_digits=2)
