"""Several named sets of prompts: each is asked, rated, noted and told by itself, in one evaluation after a step."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.config import EvaluationConfig, LearnerRun
from learner.evaluation.evaluate import evaluate
from learner.evaluation.results import FILE, as_text
from learner.report.page import compare, render, write_comparison
from learner.report.summary import as_text as as_summary
from learner.report.summary import read_metrics, summarize
from learner.storage.checkpoint import best_models
from learner.storage.run_dir import RunDir
from learner.train import train
from protocol.config import load_config, to_toml
from protocol.errors import ConfigError
from tests.fakes import ServerThread
from tests.learner.evaluation.test_alongside import STEPS, engine, evaluating, made_by, openai, server
from tests.learner.evaluation.test_evaluate import a_run
from tests.learner.mortal_learner import Death, Life
from tests.learner.openai_server import OpenAIServer
from tests.learner.runs import make_run

__all__ = ["engine", "openai", "server"]  # fixtures

FEW, MANY = 3, 5
SETS = {"few": {"num_prompts": FEW}, "many": {"num_prompts": MANY, "num_samples": 2, "temperature": 1.0}}


def test_each_set_is_asked_noted_and_reported_under_its_name(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer
) -> None:
    run = evaluating(tmp_path, server, openai.url, {"sets": SETS, "pin_policy": True, "every_steps": 3})
    train(run, resume=False)
    assert [(one.step, one.set_name, one.num_prompts) for one in made_by(run)] == [
        (3, "few", FEW), (3, "many", MANY), (STEPS, "few", FEW), (STEPS, "many", MANY)
    ]  # fmt: skip
    assert Counter(request["n"] for request in openai.requests) == {1: 2 * FEW, 2: 2 * MANY}
    last = {one.set_name: one for one in made_by(run)[2:]}
    assert all(one.difference is not None and one.versions == (STEPS, STEPS) for one in last.values())
    metrics = read_metrics(Path(run.run_dir))
    for name, one in last.items():
        assert one.reward is not None and metrics[-1][f"evaluation/{name}/reward"] == one.reward.mean
        assert metrics[-1][f"evaluation/{name}/step"] == STEPS and metrics[-2][f"evaluation/{name}/step"] == 3
    assert not any("evaluation/reward" in line for line in metrics)

    summary, page = summarize(Path(run.run_dir)), render(Path(run.run_dir))
    assert summary.evaluated_sets == {name: one.reward for name, one in last.items()}
    for name in SETS:
        assert f"evaluation of {name}" in as_summary(summary) and f"Evaluation of {name}" in page
    assert f"few: {FEW} prompts of" in page and f"many: {MANY} prompts of" in page
    comparison = write_comparison(*compare([Path(run.run_dir), copied(run, tmp_path)])).read_text()
    assert "Evaluations: few" in comparison and "Evaluations: many" in comparison


def copied(run: LearnerRun, tmp_path: Path) -> Path:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("metrics.jsonl", "ledger.db", "config.toml", FILE):
        (other / name).write_bytes((Path(run.run_dir) / name).read_bytes())
    return other


@pytest.mark.parametrize(("name", "best_step"), [("few", 4), ("many", 2)], ids=["the first", "the last"])
def test_one_set_says_which_model_is_best(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, name: str, best_step: int
) -> None:
    engine = openai.engine
    assert engine is not None

    def answer(prompt: str, count: int) -> list[str]:
        is_right = engine.version == (2 if count == 2 else 4)  # the set that does not judge prefers another
        return [prompt[-2:0:-1] if is_right else "1"] * count

    openai.answer = answer
    checkpoint = {"every_steps": 2, "keep_last": 1, "best_by": f"evaluation/{name}"}
    run = evaluating(tmp_path, server, openai.url, {"sets": SETS, "pin_policy": True}, checkpoint=checkpoint)
    train(run, resume=False)
    (best,) = best_models(RunDir.checkpoints_of(run.run_dir)).values()
    assert (best.step, best.judged_by) == (best_step, f"evaluation/{name}")


@pytest.mark.parametrize(
    "nth",
    [
        pytest.param(1, id="between the sets"),
        pytest.param(2, id="behind both", marks=pytest.mark.slow),
        pytest.param(3, id="between the next", marks=pytest.mark.slow),
    ],
)
def test_a_learner_killed_between_two_sets_notes_each_once(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, nth: int
) -> None:
    openai.delay_s = 0.3  # so that the checkpoint of the step is whole by then
    evaluation = {"sets": SETS, "pin_policy": True, "every_steps": 3}
    run = evaluating(tmp_path, server, openai.url, evaluation, checkpoint={"every_steps": 1})
    life = Life(run, Death("evaluation noted", nth), resume=False)
    assert life.end() < 0, life.log
    life = Life(run, resume=True)
    assert life.end() == 0, life.log
    assert [(one.step, one.set_name) for one in made_by(run)] == [(step, name) for step in (3, STEPS) for name in SETS]
    # Of a step after the checkpoint both sets come again, with the step.
    if nth == 2 or "resuming the evaluation after step" in life.log:
        assert len((Path(run.run_dir) / FILE).read_text().splitlines()) == 4, "none is noted twice"
        assert len(openai.requests) == 2 * (FEW + MANY), "every answer was on disk"


def test_what_a_set_does_not_say_the_section_says() -> None:
    sets = {"own": {"path": "a.jsonl", "max_tokens": 7}, "same": {"temperature": 0.0, "num_samples": 1}}
    raw = {"task": "sort", "num_prompts": 9, "num_samples": 4, "temperature": 1.0, "sets": sets}
    config = msgspec.convert(raw, EvaluationConfig)
    own, same = config.of_set("own"), config.of_set("same")
    assert (own.task, own.path, own.max_tokens, own.num_prompts, own.temperature) == (None, "a.jsonl", 7, 9, 1.0)
    assert (same.task, same.path, same.num_samples, same.temperature) == ("sort", None, 1, 0.0)
    assert config.set_names() == ["own", "same"] and EvaluationConfig().set_names() == [None]


def test_sets_are_asked_by_the_command_too_and_their_keys_are_flags(tmp_path: Path, openai: OpenAIServer) -> None:
    flags = ["--learner.evaluation.sets.few.num-prompts", "3", "--learner.evaluation.sets.all.max-tokens", "4"]
    openai.engine = None
    run = a_run(tmp_path, openai, *flags)
    config = tmp_path / "again.toml"
    config.write_text(to_toml(run))
    assert load_config(LearnerRun, [str(config)], "learner evaluate") == run
    made = evaluate(run)
    assert [(one.set_name, one.num_prompts) for one in made] == [("few", 3), ("all", 10)]
    assert as_text(made[0]).startswith("few: 3 prompts of ")


@pytest.mark.parametrize(
    ("evaluation", "told"),
    [
        ({"sets": {"hard": {"num_samples": 4}}}, r"sets\.hard\.num_samples = 4 with temperature = 0: all samples"),
        ({"sets": {"hard": {"task": "sort", "path": "a"}}}, r"sets\.hard\.task = 'sort' and path = 'a' are set"),
        ({"sets": {"Hard one": {}}}, r"sets\.Hard one is not a valid name of a set; use a-z"),
        ({"sets": {"function": {}}}, r"sets\.function is not a valid name of a set"),
    ],
)
def test_a_set_that_cannot_be_is_named(tmp_path: Path, evaluation: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError), match=told):
        make_run(tmp_path, "tcp://127.0.0.1:1", evaluation=evaluation)


@pytest.mark.parametrize(
    ("best_by", "told"),
    [
        ("evaluation", r'is not a set .*; use "evaluation/few" or "evaluation/many"'),
        ("evaluation/huge", r'is not a set .*; use "evaluation/few" or "evaluation/many"'),
        ("luck", r'best_by = "luck" is not a known ranking; use "training_reward", "evaluation"'),
    ],
)
def test_the_best_are_judged_by_a_set_that_there_is(tmp_path: Path, best_by: str, told: str) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError), match=told):
        make_run(
            tmp_path,
            "tcp://127.0.0.1:1",
            evaluation={"sets": SETS, "every_steps": 2},
            checkpoint={"every_steps": 2, "best_by": best_by},
        )


def test_an_unknown_key_of_a_set_is_named_with_what_was_meant(tmp_path: Path) -> None:
    run = a_run(tmp_path, None)
    config = tmp_path / "typo.toml"
    config.write_text(to_toml(run) + "\n[learner.evaluation.sets.hard]\nnum_prompt = 3\n")
    with pytest.raises(
        ConfigError, match=r"learner\.evaluation\.sets\.hard\.num_prompt = 3; did you mean .*hard\.num_prompts"
    ):
        load_config(LearnerRun, [str(config)], "learner evaluate")


def test_a_value_of_a_wrong_type_is_shown_with_the_set_that_it_came_in(tmp_path: Path) -> None:
    config = tmp_path / "typo.toml"
    config.write_text(to_toml(a_run(tmp_path, None)) + '\n[learner.evaluation.sets.hard]\nnum_prompts = "all"\n')
    with pytest.raises(ConfigError, match=r"learner\.evaluation\.sets\.hard\.num_prompts = 'all': Expected `int"):
        load_config(LearnerRun, [str(config)], "learner evaluate")
