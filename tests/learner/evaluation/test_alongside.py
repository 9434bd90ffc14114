"""Evaluations during training: when they start, which weights answer, what they cost, and how they resume."""

import json
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.config import LearnerRun
from learner.evaluation import openai_client, results
from learner.evaluation.background import Evaluations, PartialHeader, PartialResults
from learner.evaluation.openai_client import PromptAnswers
from learner.evaluation.results import FILE, Estimate, Evaluation, earlier
from learner.report.page import compare, comparison_text, render, write_comparison
from learner.report.summary import format_summary, read_metrics, summarize
from learner.rewards.workers import RewardWorkers
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import best_models, complete_checkpoints, remove_checkpoint
from learner.train import train
from tests.fakes import ServerThread
from tests.learner.mortal_learner import Death, Life
from tests.learner.openai_server import Answer, OpenAIServer
from tests.learner.runs import make_run

NUM_PROMPTS = 8
STEPS = 6
FEW, MANY = 3, 5
SETS = {"few": {"num_prompts": FEW}, "many": {"num_prompts": MANY, "num_samples": 2, "temperature": 1.0}}


def evaluating(
    tmp_path: Path, server: ServerThread, url: str, evaluation: dict[str, Any], **learner: Any
) -> LearnerRun:
    evaluation = {"url": url, "every_steps": 2, "timeout_s": 20, "max_concurrent": 2} | evaluation
    return make_run(tmp_path, server.endpoint, steps=STEPS, evaluation=evaluation, **learner)


def made_by(run: LearnerRun) -> list[Evaluation]:
    return earlier(Path(run.run_dir) / FILE)


def held_until(openai: OpenAIServer, version: int) -> Answer:
    """Return a script that holds back all answers after the first until the policy reaches `version`."""
    engine, answer = openai.engine, openai.answer
    assert engine is not None

    def held(prompt: str, count: int) -> list[str]:
        deadline = time.monotonic() + 60
        while len(openai.requests) > 1 and engine.version < version and time.monotonic() < deadline:
            time.sleep(0.01)
        return answer(prompt, count)

    return held


def test_a_run_is_evaluated_before_the_first_step_periodically_and_after_the_last(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Evaluations] = []
    scores: list[dict[int, float | None]] = []
    start, record = Evaluations.start, results.record_evaluation

    def watched(self: Evaluations, workers: RewardWorkers) -> None:
        started.append(self)
        start(self, workers)

    def asked_meanwhile(path: Path, made: Evaluation) -> Evaluation:
        scores.append(started[0].scores())
        return record(path, made)

    monkeypatch.setattr(Evaluations, "start", watched)
    monkeypatch.setattr(results, "record_evaluation", asked_meanwhile)
    openai.delay_s = 1.0  # longer than a step, even on a busy machine
    evaluation = {"at_start": True, "every_steps": 4, "pin_policy": True}
    run = evaluating(
        tmp_path, server, openai.url, evaluation, checkpoint={"every_steps": 4, "keep_last": 1, "best_by": "evaluation"}
    )
    train(run, resume=False)
    made = made_by(run)
    assert [(one.step, one.versions) for one in made] == [(step, (step, step)) for step in (0, 4, STEPS)]
    requested = Counter(tuple(request["prompt"]) for request in openai.requests)
    assert len(requested) == NUM_PROMPTS and set(requested.values()) == {3}
    rewards = [one.reward.mean for one in made if one.reward is not None]
    assert rewards == [made[0].rewards_P[0]] * 3
    (best,) = best_models(run.checkpoint_dir).values()
    assert (best.judged_by, best.score) == ("evaluation", rewards[0])
    assert made[2].difference is not None and made[2].difference_to_first is not None
    metrics = read_metrics(Path(run.run_dir))
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert metrics[-1]["evaluation/step"] == STEPS and metrics[-1]["evaluation/reward"] == rewards[-1]
    assert metrics[-2]["evaluation/step"] == 0 and metrics[1]["evaluation/step"] == 0
    assert "evaluation/seconds" in metrics[1], "it ended in step 1 and delayed the weight sync of that step"
    assert metrics[-1]["evaluation/training_slowdown"] > 1, "step 5 waited, earlier steps did not"
    assert not (tmp_path / "run" / "evaluation.partial.jsonl").exists()
    assert [known[step] for known, step in zip(scores, (0, 4, STEPS), strict=True)] == [None] * 3, (
        "the step waits for its evaluation"
    )
    assert None not in started[0].scores().values() and set(started[0].scores()) == {0, 4, STEPS}


def test_training_continues_during_an_evaluation_and_skips_the_next_with_a_log_line(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    openai.answer = held_until(openai, version=STEPS)
    run = evaluating(tmp_path, server, openai.url, {"every_steps": 1, "max_concurrent": 1, "num_prompts": 3})
    train(run, resume=False)
    first, *_, last = made_by(run)
    assert first.step == 1 and first.versions is not None and first.versions[0] < STEPS == first.versions[1]
    assert last.step == STEPS and last.versions == (STEPS, STEPS)
    left_out = {line["step"] - 1 for line in read_metrics(Path(run.run_dir)) if line.get("evaluation/left_out")}
    assert left_out >= {2, 3}
    assert "skipping the evaluation after step 2 (that of step 1 still running)" in caplog.text


@pytest.mark.system
def test_a_learner_killed_during_an_evaluation_requests_each_prompt_once(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer
) -> None:
    openai.delay_s = 1.0  # longer than a step, even on a busy machine
    evaluation = {"max_concurrent": 1, "pin_policy": True}
    run = evaluating(tmp_path, server, openai.url, evaluation, checkpoint={"every_steps": 1})
    life = Life(run, Death("answer kept", 3), resume=False)
    assert life.end() < 0, life.log
    life = Life(run, resume=True)
    assert life.end() == 0, life.log
    made = made_by(run)
    assert [one.step for one in made] == [2, 4, 6]
    assert all(one.num_prompts == NUM_PROMPTS == len(one.rewards_P) and None not in one.rewards_P for one in made)
    # A step after the checkpoint is trained again, so all answers are requested again; otherwise only the pending one.
    goes_on = "resuming the evaluation after step" in life.log
    assert len(openai.requests) - 3 * NUM_PROMPTS <= (1 if goes_on else 4)
    assert not (Path(run.run_dir) / "evaluation.partial.jsonl").exists()


def test_the_newest_evaluation_is_reported_without_values_of_an_older_one(tmp_path: Path) -> None:
    evaluation = {"url": "http://127.0.0.1:1", "every_steps": 1, "sets": SETS}
    run = make_run(tmp_path, "tcp://127.0.0.1:1", evaluation=evaluation)
    evaluations = Evaluations(RunInputs(run), tmp_path, "run-1")
    made = Evaluation(
        time=0.0, data="data", url="url", model="model", versions=None, num_prompts=1, num_samples=1, temperature=0.0,
        seconds=1.0, reward=Estimate(0.5, 0.4, 0.6), functions={}, pass_at={}, majority=None, reward_finished=None,
        truncated_frac=0.0, length_mean=1.0, rewards_P=[0.5], questions_digest="",
    )  # fmt: skip

    def metrics_after(step: int, **changed: Any) -> dict[str, float]:
        """Return the metrics that a step repeats after evaluations of both sets at this step."""
        for one in evaluations._sets:
            its = {"step": step, "set_name": one.set_name, "questions_digest": one.digest} | changed
            results.record_evaluation(tmp_path / FILE, msgspec.structs.replace(made, **its))
        evaluations.resume(step)
        return evaluations.pop_metrics()

    names = {f"evaluation/{name}/{end}" for name in SETS for end in ("step", "reward", "reward/low", "reward/high")}
    assert metrics_after(1).keys() == names
    all_equal = metrics_after(2, reward=Estimate(1.0))
    assert all_equal.keys() == {name for name in names if name.endswith(("step", "reward"))}
    assert metrics_after(3, reward=None) == {f"evaluation/{name}/step": 3.0 for name in SETS}


def test_a_run_killed_in_its_last_evaluation_requests_only_missing_answers(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    run = evaluating(tmp_path, server, openai.url, {"pin_policy": True, "sets": SETS, "every_steps": 3})
    train(run, resume=False)
    noted, partial = Path(run.run_dir) / FILE, PartialResults(Path(run.run_dir))
    *others, few, many = noted.read_text().splitlines(keepends=True)
    digest = "+".join(json.loads(line)["asked"] for line in (few, many))

    def resumed(lines: list[str], indices: tuple[int, ...] | None) -> list[Evaluation]:
        """Resume with these lines and with wrong answers at `indices` of the last step; None: without answers."""
        noted.write_text("".join(lines))
        if indices is not None:
            partial.begin(PartialHeader(STEPS, digest))
            for index in indices:
                count = 1 if index < FEW else 2
                partial.add(index, PromptAnswers([""] * count, [[0]] * count, count, [True] * count, (STEPS, STEPS)))
            partial.close()
        openai.requests.clear()
        train(run, resume=True)
        assert not (Path(run.run_dir) / "evaluation.partial.jsonl").exists()
        assert [(one.step, one.set_name) for one in made_by(run)] == [
            (step, name) for step in (3, STEPS) for name in SETS
        ]
        assert read_metrics(Path(run.run_dir))[-1]["step"] == STEPS
        return made_by(run)[-2:]

    of_few, of_many = resumed(others, (1, 4))
    assert len(openai.requests) == FEW + MANY - 2
    for one in (of_few, of_many):
        assert [index for index, reward in enumerate(one.rewards_P) if reward == 0] == [1]
    of_few, _ = resumed([*others, few], tuple(range(FEW + MANY)))
    assert openai.requests == [] and of_few == msgspec.json.decode(few, type=Evaluation), (
        "each evaluation is recorded once"
    )
    openai.delay_s = 0.3
    with caplog.at_level(logging.INFO):
        resumed(others, None)
    assert "waiting for the evaluation after the last step" in caplog.text and len(openai.requests) == FEW + MANY


@pytest.mark.parametrize(
    ("run_of_server", "tells_versions", "message"),
    [
        ("other-1f2e", True, "was answered by the weights of other-1f2e instead of run-"),
        ("other-1f2e", False, "it is not a Slipstream server; set learner.evaluation.url to the server of run run-"),
    ],
    ids=["of another run", "of an unknown version"],
)
def test_answers_of_foreign_weights_fail_the_evaluation_but_not_the_training(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, caplog: pytest.LogCaptureFixture,
    run_of_server: str, tells_versions: bool, message: str,
) -> None:  # fmt: skip
    openai.run, openai.tells_tokens = lambda: run_of_server, tells_versions
    run = evaluating(tmp_path, server, openai.url, {"every_steps": 3, "pin_policy": True, "timeout_s": 1.2})
    train(run, resume=False)
    assert made_by(run) == [] and message in caplog.text and "the evaluation after step 3 failed" in caplog.text
    failed = [line["step"] for line in read_metrics(Path(run.run_dir)) if line.get("evaluation/failed")]
    assert failed == [5, STEPS], "step 4 waited for the first evaluation"


def test_an_unexpected_error_of_an_evaluation_does_not_stop_the_training(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("OPENAI_API_KEY", "a\nb")  # no HTTP header can hold it
    run = evaluating(tmp_path, server, openai.url, {"every_steps": STEPS})
    train(run, resume=False)
    assert made_by(run) == [] and f"the evaluation after step {STEPS} failed: ValueError(" in caplog.text


def test_a_resume_removes_evaluations_of_discarded_weights_and_repeats_them(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_client, "AGAIN_AFTER_S", 0.1)
    openai.num_untrained = 3
    run = evaluating(tmp_path, server, openai.url, {"pin_policy": True}, checkpoint={"every_steps": 3})
    train(run, resume=False)
    assert len(openai.requests) == 3 * NUM_PROMPTS + 3
    noted = Path(run.run_dir) / FILE
    by_hand = results.record_evaluation(noted, msgspec.structs.replace(made_by(run)[0], step=None))
    remove_checkpoint(complete_checkpoints(run.checkpoint_dir)[-1])
    train(run, resume=True)
    again = made_by(run)
    assert [one.step for one in again] == [2, None, 4, 6] and again[1] == by_hand
    assert again[2].before == (2, 2), "compared with the newest valid evaluation"
    assert len(noted.read_text().splitlines()) == 4


def test_each_set_is_recorded_under_its_name_and_one_set_selects_the_best_model(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer
) -> None:
    def answer(prompt: str, count: int) -> list[str]:
        is_right = server.engine.version == (3 if count == 2 else STEPS)  # the other set prefers another version
        return [prompt[-2:0:-1] if is_right else "1"] * count

    openai.answer = answer
    evaluation = {"sets": SETS, "pin_policy": True, "every_steps": 3}
    checkpoint = {"every_steps": 3, "keep_last": 1, "best_by": "evaluation/many"}
    run = evaluating(tmp_path, server, openai.url, evaluation, checkpoint=checkpoint)
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
    directory = run.checkpoint_dir
    (best,) = best_models(directory).values()
    (score,) = (one.reward.mean for one in made_by(run) if (one.step, one.set_name) == (3, "many"))
    assert (best.step, best.judged_by, best.score) == (3, "evaluation/many", score)
    assert [path.name for path in complete_checkpoints(directory)] == [f"step-{STEPS:06d}"], (
        "the best model is not a checkpoint"
    )

    summary, page = summarize(Path(run.run_dir)), render(Path(run.run_dir))
    assert summary.evaluated_sets == {name: one.reward for name, one in last.items()} and summary.evaluation is None
    for name in SETS:
        assert f"evaluation of {name}" in format_summary(summary) and f"Evaluation of {name}" in page
    assert f"few: {FEW} prompts of" in page and f"many: {MANY} prompts of" in page
    other = tmp_path / "other"
    other.mkdir()
    for file in ("metrics.jsonl", "ledger.db", "config.toml", FILE):
        (other / file).write_bytes((Path(run.run_dir) / file).read_bytes())
    compared, lines = compare([Path(run.run_dir), other])
    comparison = write_comparison(compared, lines).read_text()
    assert "Evaluations: few" in comparison and "Evaluations: many" in comparison
    few, many = (one.reward for one in last.values())
    assert f"few {few}, many {many}, step {STEPS}" in comparison_text(compared) and summary.evaluation is None
