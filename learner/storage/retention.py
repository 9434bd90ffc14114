"""Retention: when a checkpoint is written and which stay. Between the main loop and checkpoint.py, which writes them.

Invariant: the ledger keeps the completions that a resume from any of the `keep_last` newest needs, and no older ones; so of an
older checkpoint that stays because it is among the best only the model is kept, for a new run to begin with.
"""

import logging
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from learner.config.storage import EVALUATION
from learner.rollouts.ledger import Ledger
from learner.rollouts.queue import GroupQueue
from learner.storage.checkpoint import (
    Best,
    Course,
    best_models,
    complete_checkpoints,
    keep_model_alone,
    read_state,
    remove_checkpoint,
)
from learner.storage.files import writing
from learner.storage.writer import CheckpointWriter
from learner.training.policy_trainer import PolicyTrainer

log = logging.getLogger(__name__)

TRAINING_REWARD = "training reward"
"""What else tells how good a checkpoint is: that at the evaluation after it, by the name that `best_by` has for it."""


class Books(NamedTuple):
    """What rank 0 alone has, the checkpoint's other half."""

    ledger: Ledger
    queue: GroupQueue
    scores: Callable[[], Mapping[int, float | None]]
    """Of the evaluations, by step; None: not known yet."""


class Checkpoints(CheckpointWriter):
    """Those of one run. Every rank has it; rank 0, which has the books, decides what stays."""

    def __init__(self, trainer: PolicyTrainer, directory: Path, books: Books | None, newest_step: int | None) -> None:
        """`newest_step`: that of the checkpoint the run was resumed from."""
        super().__init__(trainer, directory)
        self._books, self._newest_step = books, newest_step
        self._rewards: list[float] = []
        """The mean reward of every step since the newest checkpoint."""

    def after_step(self, step: int, metrics: dict[str, float]) -> None:
        """Save if it is time."""
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        if step % self._trainer.config.checkpoint.every_steps == 0:
            self.save(step)

    def save(self, step: int) -> None:
        """Begin a checkpoint, unless the newest is of this step; once it is complete, those that need not stay are removed.

        Raises DiskError, DeadlineExceeded.
        """
        if step == self._newest_step:
            return
        reward_mean = statistics.fmean(self._rewards) if self._rewards else None
        pass_rates = self._books.queue.pass_rates() if self._books is not None else None
        self.begin(step, Course(reward_mean=reward_mean, pass_rates=pass_rates), self._newest_step, self._retain)
        self._newest_step = step
        self._rewards.clear()

    def _retain(self) -> None:
        """In the background of rank 0: nothing is removed or forgotten before the newest is complete."""
        assert self._books is not None
        config = self._trainer.config.checkpoint
        with writing(self._directory):
            scores = self._books.scores() if config.is_by_evaluation else None
            oldest_step = prune(self._directory, config.keep_last, config.keep_best, scores, config.best_by)
        self._books.ledger.forget_payloads(oldest_step)


def prune(
    directory: Path,
    keep_last: int,
    keep_best: int,
    scores: Mapping[int, float | None] | None = None,
    evaluation: str = EVALUATION,
) -> int:
    """Remove all complete checkpoints but the newest, and of the best all but their models; return the step of the oldest that a
    resume may use.

    `scores`: of the evaluations, which then say what is best; one that is not judged yet stays whole until it is. `evaluation`: which
    of them these are, for the scores of another set are no measure.
    """
    states = {checkpoint: read_state(checkpoint) for checkpoint in complete_checkpoints(directory)}
    newest = list(states)[-keep_last:]  # -0: all
    judged_by = TRAINING_REWARD if scores is None else evaluation
    with_model = {path: state for path, state in states.items() if (path / "model").is_dir()}
    score_of = {
        path: state.reward_mean if scores is None else scores.get(state.step) for path, state in with_model.items()
    }
    judged = {path: best for path, best in best_models(directory).items() if best.judged_by == judged_by} | {
        path: Best(step=states[path].step, score=score, judged_by=judged_by)
        for path, score in score_of.items()
        if score is not None
    }
    in_order = sorted(judged, key=lambda path: (judged[path].score, judged[path].step), reverse=True)
    best = in_order[:keep_best]
    awaited = {
        path for path, state in with_model.items() if keep_best and scores and scores.get(state.step, 0.0) is None
    }
    for checkpoint in (states.keys() | judged.keys()) - {*newest, *best, *awaited}:
        log.info("removing %s", checkpoint)
        remove_checkpoint(checkpoint)
    for checkpoint in set(best) - set(newest):
        if checkpoint in states:
            score = judged[checkpoint].score
            log.info("%s stays as a model alone: it is among the best by %s (%.4g)", checkpoint, judged_by, score)
        keep_model_alone(checkpoint, judged[checkpoint])
    return states[newest[0]].step
