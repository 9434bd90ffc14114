"""The evaluation benchmark: its reading of a run's files, and its comparison of two answers."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from learner.evaluation.results import Evaluation
from learner.policy.model import load_policy
from protocol.model_files import resolve_model
from tests.bench.evaluation import NUM_PROBLEMS, _Answers, config_of, cost_of, gaps_of

pytestmark = pytest.mark.system


def made(step: int, ended_at: float, seconds: float) -> Evaluation:
    known: dict[str, Any] = dict.fromkeys(("reward", "majority", "reward_finished", "versions"))
    known |= {"functions": {}, "pass_at": {}, "rewards_P": [], "num_samples": 1, "temperature": 0.0}
    named = {
        "data": "d",
        "asked": "a",
        "url": "u",
        "model": "m",
        "num_prompts": 1,
        "truncated_frac": 0.0,
        "length_mean": 1.0,
    }
    return msgspec.convert(known | named | {"time": ended_at, "seconds": seconds, "step": step}, Evaluation)


def test_steps_during_an_evaluation_are_compared_with_earlier_steps() -> None:
    before = [{"step": step, "time": 100.0 + step} for step in range(1, 31)]
    beside = [{"step": 30 + i, "time": 130.0 + 3 * i} for i in range(1, 5)]
    after = [{"step": 35, "time": 143.0}]
    cost = cost_of(made(30, ended_at=139.5, seconds=9.4), [*before, *beside, *after])
    assert (cost["steps_beside"], cost["slowdown_by_clock"]) == (4, pytest.approx(3.0))
    assert cost["training_lost_s"] == pytest.approx(8.0)
    last = cost_of(made(35, ended_at=150.0, seconds=5.0), [*before, *beside, *after])
    assert last["steps_beside"] == 0 and last["slowdown_by_clock"] is None, "no step ran during the last evaluation"


def test_each_third_of_the_demo_is_evaluated_and_keeps_its_checkpoint(tmp_path: Path) -> None:
    learner = config_of(tmp_path, 300, pin=True).learner
    assert (learner.steps, learner.evaluation.every_steps, learner.checkpoint.every_steps) == (300, 100, 100)
    assert (
        learner.checkpoint.keep_last == 3
        and learner.evaluation.pin_policy
        and learner.evaluation.num_prompts == NUM_PROBLEMS
    )


def test_answers_are_kept_after_the_learner_removes_them(tmp_path: Path) -> None:
    answers = _Answers(tmp_path, tmp_path)
    answers.look()
    file = tmp_path / "evaluation.partial.jsonl"
    for step in (20, 40):
        lines = [{"step": step, "asked": ""}]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        answers.look()
        with file.open("a") as rest:
            for place in reversed(range(NUM_PROBLEMS)):
                rest.write(json.dumps({"place": place, "answered": {"token_ids_K": [[place, step]]}}) + "\n")
        answers.look()
        os.unlink(file)
    assert {step: kept[3] for step, kept in answers.by_step().items()} == {20: [3, 20], 40: [3, 40]}


@torch.no_grad()
def test_the_gap_at_the_first_difference_of_two_answers_is_from_the_weights() -> None:
    path = resolve_model("tiny:digits")
    policy, prompt = load_policy(path, gradient_checkpointing=False), [5, 6, 7]
    first = policy(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    best, second, *_ = first.argsort(descending=True).tolist()
    gap, longer = gaps_of(path, [(prompt, [best, 1], [second, 1]), (prompt, [best], [best, 2])])
    assert gap == pytest.approx(float(first[best] - first[second])) and longer == float("inf")
