"""Built-in tasks: deterministic rows, no prompt twice."""

import pytest

from learner.tasks import make_rows
from protocol.errors import DataError


def test_reverse_gives_digits_and_their_reverse():
    rows = make_rows("reverse", 100, seed=3)
    for row in rows:
        assert row["prompt"][-1] == ">" and row["prompt"][:-1].isdigit() and len(row["prompt"]) == 9
        assert row["answer"] == row["prompt"][-2::-1]
    assert len({row["prompt"] for row in rows}) == 100


def test_rows_depend_on_the_seed_alone():
    assert make_rows("reverse", 50, seed=3) == make_rows("reverse", 50, seed=3)
    assert make_rows("reverse", 50, seed=3) != make_rows("reverse", 50, seed=4)


def test_every_prompt_of_a_small_task_can_be_had_and_not_one_more():
    assert {row["prompt"] for row in make_rows("reverse", 10, seed=0, num_digits=1)} == {f"{i}>" for i in range(10)}
    with pytest.raises(DataError, match=r"num_digits = 1 has 10 distinct prompts, num_prompts = 11"):
        make_rows("reverse", 11, seed=0, num_digits=1)


def test_an_unknown_task_is_an_error_that_lists_the_known():
    with pytest.raises(DataError, match=r"'revers' is not a built-in task; known are: reverse"):
        make_rows("revers", 1, seed=0)
