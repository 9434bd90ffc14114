"""Chaos during evaluations: the schedule and the audits."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from learner.config import LearnerRun
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompts
from learner.rollouts.ledger import Ledger
from protocol.model_files import resolve_model
from tests.chaos.answers import AnswerAudit
from tests.chaos.evaluations import ANSWERED, audit_evaluations
from tests.chaos.fake_http import greedy
from tests.chaos.learner_process import WEIGHTS
from tests.chaos.run import make_config
from tests.chaos.schedule import OF_EVALUATIONS, schedule
from tests.learner.ledgers import receive

pytestmark = pytest.mark.system

NUM_STEPS = 5
DUE = (0, 2, 4, 5)
SIZES = {"few": 5, "many": 8}
Lines = list[dict[str, Any]]


def test_half_of_the_faults_hit_evaluations_in_a_campaign_with_evaluations_and_none_in_others() -> None:
    (leg,) = schedule(7, 24, "fake", has_evaluations=True)
    states = {state.label for state, _, _ in OF_EVALUATIONS}
    about = [(fault.state, fault.target, fault.kind) for fault in leg.faults if fault.state.label in states]
    assert len(about) == 12 and set(about) == {each for each in OF_EVALUATIONS if each[1] != "engine core"}
    (real,) = schedule(7, 24, "real", has_evaluations=True)
    assert {(fault.state, fault.target, fault.kind) for fault in real.faults} >= set(OF_EVALUATIONS)
    assert leg.has_evaluations and not schedule(7, 24, "fake")[0].has_evaluations
    assert all(fault.state.label not in states for fault in schedule(7, 60, "fake")[0].faults)


def a_config(directory: Path, *, pin: bool = True) -> LearnerRun:
    (leg,) = schedule(0, 1, "fake", has_evaluations=True)
    return make_config(msgspec.structs.replace(leg, seed=0, sync_overlap=not pin), "fake", directory)  # every two steps


def make_run(directory: Path) -> tuple[Lines, dict[int, Lines]]:
    """Write a run of five steps with correct evaluations. Return its lines, and the answers of each step."""
    run_dir = directory / "run"
    run_dir.mkdir()
    ledger = Ledger(run_dir / "ledger.db")
    for slot in range(NUM_STEPS):
        ledger.admit(slot=slot, attempt=0, position=slot, epoch=0, prompt_id=slot, version=0)
        receive(ledger, f"{slot}.0", b"group", 0, 5)
        ledger.score(f"{slot}.0", "[]", 0.5)
        ledger.consume([(f"{slot}.0", 0)], slot + 1)
    ledger.close()
    lines, answers = [], {}
    for step in DUE:
        reward = step / 10
        lines += [
            {
                "time": time.time() + 1, "step": step, "set_name": name, "num_prompts": size,
                "rewards_P": [reward] * size,
                "reward": {"mean": reward}, "versions": [step, step],
                "difference": None if step == 0 else {"mean": reward - DUE[DUE.index(step) - 1] / 10},
            }
            for name, size in SIZES.items()
        ]  # fmt: skip
        answered = {"token_ids_K": [[1, 2, 3]], "versions": [step, step]}
        answers[step] = [{"place": place, "answered": dict(answered)} for place in range(sum(SIZES.values()))]
    return lines, answers


def problems_after(
    directory: Path, corrupt: Callable[[Lines, dict[int, Lines]], object], *, pin: bool = True, log: str = ""
) -> list[str]:
    lines, answers = make_run(directory)
    corrupt(lines, answers)
    (directory / "run" / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / ANSWERED).mkdir()
    for number, (step, kept) in enumerate(answers.items()):
        text = "".join(json.dumps(line) + "\n" for line in [{"step": step, "asked": ""}, *kept])
        (directory / ANSWERED / str(number)).write_text(text)
    (directory / "learner.log").write_text(log)
    found = audit_evaluations(directory, a_config(directory, pin=pin), NUM_STEPS, lambda line, answers: [])
    assert found.due == len(DUE)
    return found.wrong


def change_nothing(lines: Lines, answers: dict[int, Lines]) -> None:
    """Leave the run correct."""


def drop_a_line(lines: Lines, answers: dict[int, Lines]) -> None:
    del lines[5]


def record_a_line_twice(lines: Lines, answers: dict[int, Lines]) -> None:
    lines.insert(6, dict(lines[5]))


def date_a_line_before_its_step(lines: Lines, answers: dict[int, Lines]) -> None:
    lines[4]["time"] -= 3600


def forget_a_prompt(lines: Lines, answers: dict[int, Lines]) -> None:
    lines[5]["rewards_P"][2] = None


def count_a_prompt_twice(lines: Lines, answers: dict[int, Lines]) -> None:
    lines[5]["rewards_P"].append(lines[5]["rewards_P"][0])


def move_the_mean(lines: Lines, answers: dict[int, Lines]) -> None:
    lines[4]["reward"]["mean"] += 0.01


def answer_twice(lines: Lines, answers: dict[int, Lines]) -> None:
    answers[4].append(answers[4][7])


def lose_an_answer(lines: Lines, answers: dict[int, Lines]) -> None:
    del answers[5][6]


def answer_from_base_weights(lines: Lines, answers: dict[int, Lines]) -> None:
    lines[4]["versions"] = [-1, 4]
    answers[4][1]["answered"]["versions"] = [-1, -1]


def hide_a_version(lines: Lines, answers: dict[int, Lines]) -> None:
    answers[4][1]["answered"]["versions"] = [-1, -1]


def record_a_wrong_difference(lines: Lines, answers: dict[int, Lines]) -> None:
    lines[7]["difference"]["mean"] = 0.0


@pytest.mark.parametrize(
    ("corrupt", "problem"),
    [
        (change_nothing, None),
        (drop_a_line, "the evaluation of many after step 4 is missing"),
        (record_a_line_twice, "the evaluation of many after step 4 was recorded twice"),
        (date_a_line_before_its_step, "the evaluation of few after step 4 is of weights that were trained again"),
        (forget_a_prompt, "counts 8 prompts with 1 missing rewards"),
        (count_a_prompt_twice, "the evaluation of many after step 4 counts 8 prompts"),
        (move_the_mean, "records the mean 0.41"),
        (answer_twice, "the evaluation after step 4 has 2 answers to prompt 7"),
        (lose_an_answer, "the evaluation after step 5 has 0 answers to prompt 6"),
        (answer_from_base_weights, "is pinned, but was answered by versions [-1, 4]"),
        (hide_a_version, "records versions [4, 4] of answers by"),
        (record_a_wrong_difference, "the evaluation of many after step 5 records the difference 0.0, not 0.1000"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_audit_finds_every_defect_of_an_evaluation(
    tmp_path: Path, corrupt: Callable[[Lines, dict[int, Lines]], object], problem: str | None
) -> None:
    found = problems_after(tmp_path, corrupt)
    assert any(problem in text for text in found) if problem else found == []


def test_an_evaluation_may_be_skipped_while_another_is_running_unless_the_run_pins(tmp_path: Path) -> None:
    def drop_a_step(lines: Lines, answers: dict[int, Lines]) -> None:
        del lines[4:6]
        lines[4]["difference"]["mean"] = lines[5]["difference"]["mean"] = 0.3

    log = "12:00:00 skipping the evaluation after step 4 (that of step 2 still running); raise it\n"
    for pin in (True, False):
        directory = tmp_path / str(pin)
        directory.mkdir()
        found = problems_after(directory, drop_a_step, pin=pin, log=log)
        assert len(found) == (2 if pin else 0), found


def test_answers_are_checked_against_the_weights_they_name_and_rewards_against_the_answers(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    path = resolve_model(config.model)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    data = msgspec.structs.replace(config.learner.data, shuffle=False, num_prompts=2)
    prompts = Prompts(data, load_tokenizer(path), config.seed)
    (tmp_path / WEIGHTS).mkdir()

    def keep(version: int) -> None:
        weights = {name: tensor.clone() for name, tensor in model.named_parameters()}
        save_file(weights, tmp_path / WEIGHTS / f"{version}-a.safetensors")

    keep(3)
    answers = [
        {"token_ids_K": [greedy(model, prompts.prompt_at(place).token_ids, 5)], "versions": [3, 3]}
        for place in range(2)
    ]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    keep(4)
    audit = AnswerAudit(tmp_path, config)
    worth = [audit._worth(prompts.prompt_at(place).token_ids, answers[place]["token_ids_K"][0]) for place in range(2)]
    line = {"set_name": "few", "rewards_P": worth}
    assert audit.problems(line, answers) == []
    (swapped,) = audit.problems(line | {"rewards_P": [worth[0], worth[1] + 0.2]}, answers)
    assert "for prompt 1, whose answer is worth" in swapped
    (mislabelled,) = audit.problems(line, [answers[0], answers[1] | {"versions": [4, 4]}])
    assert "an answer to prompt 1 by version 4 whose weights prefer another token" in mislabelled
