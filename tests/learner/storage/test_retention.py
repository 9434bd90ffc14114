"""Which checkpoints are kept, and which of them can be resumed."""

import json
import shutil
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from learner.evaluation.background import Evaluations
from learner.evaluation.eval_sets import sets_of
from learner.rollouts.ledger import LedgerError
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import (
    STATE_FILE,
    CheckpointState,
    best_models,
    complete_checkpoints,
    find_checkpoint,
    step_of,
)
from learner.storage.retention import prune
from learner.train import train
from tests.learner.ledgers import steps_kept
from tests.learner.model_engine import tiny_server
from tests.learner.publishing.finished_run import evaluate
from tests.learner.runs import make_run, metrics_of
from tests.learner.storage.same_end import assert_ends_alike, make_comparable_run


def checkpoints(directory: Path, rewards: dict[int, float | None]) -> None:
    """Write the parts of checkpoints that retention reads."""
    for step, reward in rewards.items():
        path = directory / f"step-{step:06d}"
        path.mkdir()
        state = CheckpointState(step=step, version=step, reference=None, kl_coef=0.0, reward_mean=reward)
        (path / STATE_FILE).write_bytes(msgspec.json.encode(state))
        (path / "trained").mkdir()
        (path / "trained/index.json").write_bytes(b"{}")
        (path / "model").mkdir()
        (path / "model/config.json").write_bytes(b"{}")


def steps_in(directory: Path) -> list[int]:
    return [step_of(path) for path in complete_checkpoints(directory)]


def test_the_best_checkpoints_can_be_chosen_by_evaluations(tmp_path: Path) -> None:
    checkpoints(tmp_path, {10: 0.9, 20: 0.1, 30: 0.2, 40: 0.2, 50: 0.1})
    scores: dict[int, float | None] = {10: 0.1, 20: 0.8, 40: None, 50: None}
    assert prune(tmp_path, 1, 1, scores) == 50
    assert steps_in(tmp_path) == [40, 50], "the evaluation of step 40 is pending"
    (kept,) = best_models(tmp_path).values()
    assert (kept.step, kept.score, kept.judged_by) == (20, 0.8, "evaluation")
    prune(tmp_path, 1, 1, scores | {40: 0.9})
    assert steps_in(tmp_path) == [50] and [best.step for best in best_models(tmp_path).values()] == [40]


def test_a_resume_with_other_questions_ranks_only_by_scores_of_these(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tcp://127.0.0.1:1", evaluation={"every_steps": 10, "num_prompts": 4})
    run_inputs, directory = RunInputs(run), tmp_path / "run"
    (directory / "checkpoints").mkdir(parents=True)
    checkpoints(directory / "checkpoints", {10: None, 20: None})
    evaluate(run, 10, 0.9, questions_digest="easier")
    prune(directory / "checkpoints", 1, 1, {10: 0.9})
    (now,) = sets_of(run_inputs)
    evaluate(run, 20, 0.4, None, questions_digest=now.digest)
    evaluations = Evaluations(run_inputs, directory, "run")
    evaluations.resume(20)
    checkpoints(directory / "checkpoints", {30: None})
    prune(directory / "checkpoints", 1, 1, evaluations.scores())
    assert {best.step: best.score for best in best_models(directory / "checkpoints").values()} == {10: 0.9, 20: 0.4}
    assert steps_in(directory / "checkpoints") == [30]


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "whole", "models"),
    [
        (2, 0, [40, 50], []),
        (1, 1, [50], [30]),  # the newer of 20 and 30, which are equally good
        (2, 2, [40, 50], [20, 30]),
        (1, 9, [50], [20, 30, 40]),  # step 10 has no reward
        (9, 0, [10, 20, 30, 40, 50], []),
        (0, 0, [10, 20, 30, 40, 50], []),
    ],
)
def test_the_newest_checkpoints_are_kept_whole_and_of_the_best_only_the_model(
    tmp_path: Path, keep_last: int, keep_best: int, whole: list[int], models: list[int]
) -> None:
    checkpoints(tmp_path, {10: None, 20: 0.9, 30: 0.9, 40: 0.2, 50: 0.1})
    for _ in range(2):
        assert prune(tmp_path, keep_last, keep_best) == whole[0]
        assert steps_in(tmp_path) == whole
        assert sorted(best.step for best in best_models(tmp_path).values()) == models
        assert len(list(tmp_path.iterdir())) == len(whole) + len(models)
        for path, best in best_models(tmp_path).items():
            assert sorted(file.name for file in path.rglob("*")) == ["best.json", "config.json", "model"]
            assert best.judged_by == "training reward"


def test_a_better_model_replaces_the_best_and_a_kill_in_between_is_repaired(tmp_path: Path) -> None:
    checkpoints(tmp_path, {10: 0.5, 20: 0.1})
    prune(tmp_path, 1, 1)
    (tmp_path / "step-000010/trained").mkdir()
    checkpoints(tmp_path, {30: 0.4})
    prune(tmp_path, 1, 1)
    assert not (tmp_path / "step-000010/trained").exists() and steps_in(tmp_path) == [30]
    checkpoints(tmp_path, {40: 0.7, 50: 0.1})
    prune(tmp_path, 1, 1)
    assert [best.score for best in best_models(tmp_path).values()] == [0.7] and steps_in(tmp_path) == [50]


def test_without_exported_models_no_best_is_kept(tmp_path: Path) -> None:
    checkpoints(tmp_path, {10: 0.9, 20: 0.1})
    shutil.rmtree(tmp_path / "step-000010/model")
    prune(tmp_path, 1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000020"]


def test_a_checkpoint_after_a_million_steps_is_newer_than_those_before(tmp_path: Path) -> None:
    checkpoints(tmp_path, {999_998: 0.1, 999_999: 0.1, 1_000_000: 0.1, 1_000_001: 0.1})
    assert prune(tmp_path, 2, 0) == 1_000_000
    assert steps_in(tmp_path) == [1_000_000, 1_000_001]


def test_a_copy_of_a_checkpoint_under_another_name_is_neither_used_nor_removed(tmp_path: Path) -> None:
    checkpoints(tmp_path, {50: 0.9, 100: 0.2, 150: 0.1})
    prune(tmp_path, 2, 1)
    shutil.copytree(tmp_path / "step-000050", tmp_path / "step-000050.bak")
    (tmp_path / "step-000150").rename(tmp_path / "step-000150.bad")  # to resume from the previous one
    checkpoints(tmp_path, {200: 0.1})
    assert prune(tmp_path, 1, 0) == 200 and find_checkpoint(tmp_path) == tmp_path / "step-000200"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000050.bak", "step-000150.bad", "step-000200"]


def test_a_run_resumes_from_any_of_the_newest_checkpoints_but_not_from_older_ones(tmp_path: Path) -> None:
    """An older checkpoint has no payloads of the steps after it."""
    with tiny_server() as server:
        whole = make_comparable_run(tmp_path / "whole", server.endpoint, checkpoint={"every_steps": 2, "keep_last": 2})
        train(whole, resume=False)
        newest = complete_checkpoints(Path(whole.run_dir) / "checkpoints")
        rewards = [line["reward/mean"] for line in metrics_of(whole)]
        for path, step, led_to_it in zip(newest, (4, 5), (rewards[2:4], rewards[4:]), strict=True):
            state = json.loads((path / STATE_FILE).read_text())
            assert state["step"] == step and state["reward_mean"] == pytest.approx(fmean(led_to_it))
        assert 5 in steps_kept(whole) and 1 not in steps_kept(whole)
        back = make_comparable_run(tmp_path / "back", server.endpoint)
        shutil.copytree(whole.run_dir, back.run_dir)
        shutil.rmtree(Path(back.run_dir) / "checkpoints/step-000005")
        train(back, resume=True)
        assert_ends_alike(back, whole)
        for path in newest:
            shutil.rmtree(path)
        with pytest.raises(LedgerError, match=r"cannot go back to step 0: .*; restore the checkpoints of this run, or"):
            train(whole, resume=True)
