"""Rewards are cheap to test, and mistakes are expensive: a policy finds every loophole."""

import json
from pathlib import Path

import pytest
from reward import places_right

ROWS = [json.loads(line) for line in (Path(__file__).parent / "prompts.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["prompt"])
def test_the_answer_is_worth_most_and_everything_else_less(row):
    right = row["answer"]
    others = ["", right[:-1], right + "0", right + " ", right + " 0", right[::-1], "0" * 20]
    best, *worse = places_right([right, *others], answer=[right] * 8)
    assert best == 1.0 and all(reward < 1.0 for reward in worse)
