"""Which checkpoint an export takes."""

import logging
from pathlib import Path

import pytest

from learner.config import LearnerRun
from learner.publishing.checkpoint_choice import choose_checkpoint
from protocol.errors import ConfigError
from tests.learner.publishing.finished_run import empty_checkpoint, evaluate, reduce_to_model, start


@pytest.fixture
def run(tmp_path: Path) -> LearnerRun:
    """Return a run with three checkpoints, the first of them reduced to its model."""
    run = start(tmp_path)
    for step, reward in ((10, 0.9), (20, 0.2), (30, 0.5)):
        empty_checkpoint(run, step, reward)
    (reduce_to_model(run, 10, 0.9) / "model").mkdir()
    return run


def chosen(run: LearnerRun, which: str, ranking: str = "training_reward") -> tuple[int, str]:
    found = choose_checkpoint(Path(run.run_dir), run.checkpoint_dir, which, ranking)
    assert found.path.name == f"step-{found.step:06d}"
    return found.step, found.reason


def test_the_newest_one_of_a_step_and_the_best_by_reward_are_found(run: LearnerRun) -> None:
    assert chosen(run, "latest") == (30, "newest of 3")
    assert chosen(run, "20") == (20, "chosen by its step")
    assert chosen(run, "best") == (10, "best of 3 by training_reward: 0.9")


def test_any_metric_of_an_evaluation_may_decide(run: LearnerRun) -> None:
    for step, reward in ((10, 0.1), (20, 0.8), (30, 0.8)):
        evaluate(run, step, reward)
        evaluate(run, step, 1 - reward, "hard")
    assert chosen(run, "best", "evaluation") == (30, "best of 3 by evaluation: 0.8"), "of equals, the newer one"
    assert chosen(run, "best", "evaluation/hard")[0] == 10
    assert chosen(run, "best", "evaluation/pass_at_4/exact_match") == (
        10, "best of 3 by evaluation/pass_at_4/exact_match: 0.9",
    )  # fmt: skip


def test_evaluations_of_other_prompts_do_not_compete(run: LearnerRun) -> None:
    evaluate(run, 10, 1.0, questions_digest="the prompts before a resume")
    evaluate(run, 20, 0.3)
    evaluate(run, 30, 0.2)
    assert chosen(run, "best", "evaluation") == (20, "best of 2 by evaluation: 0.3")


def test_a_better_step_without_a_checkpoint_is_named(run: LearnerRun, caplog: pytest.LogCaptureFixture) -> None:
    evaluate(run, 15, 1.0)
    evaluate(run, 20, 0.3)
    with caplog.at_level(logging.WARNING):
        assert chosen(run, "best", "evaluation")[0] == 20
    assert "step 15 has a better evaluation (1) than step 20 (0.3), but its checkpoint was not kept" in caplog.text


def test_what_cannot_be_chosen_is_refused_with_what_can(run: LearnerRun, tmp_path: Path) -> None:
    for which, ranking, expected in (
        ("25", "training_reward", "--checkpoint 25: expected latest, best, or the step of a checkpoint .*: 10, 20, 30"),
        ("newest", "training_reward", "--checkpoint newest: expected latest"),
        (
            "best",
            "evaluation",
            "no evaluation in .* has the metric evaluation; use training_reward, or let the next run",
        ),
    ):
        with pytest.raises(ConfigError, match=expected):
            chosen(run, which, ranking)
    evaluate(run, 15, 1.0)
    with pytest.raises(ConfigError, match=r"no checkpoint .* has a score by evaluation: .* 10, 20, 30, and .* 15"):
        chosen(run, "best", "evaluation")
    with pytest.raises(ConfigError, match="has the metric accuracy; use training_reward, or one of evaluation/"):
        chosen(run, "best", "accuracy")
    with pytest.raises(ConfigError, match="has no complete checkpoint; wait for the first"):
        choose_checkpoint(tmp_path, tmp_path / "nothing", "latest", "training_reward")
