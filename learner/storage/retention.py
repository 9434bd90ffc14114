"""Retention policy: when checkpoints are written, and which ones stay.

Invariant: the ledger keeps the completions that a resume from any of the `keep_last` newest checkpoints
needs, and no older ones. An older checkpoint among the best therefore keeps only its model, which a new run
can start from.
"""

import logging
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from learner.config.outputs import EVALUATION
from learner.rollouts.ledger import Ledger
from learner.rollouts.rollout_buffer import RolloutBuffer
from learner.storage.checkpoint import (
    BestCheckpoint,
    CheckpointState,
    RunProgress,
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
"""Name of the ranking by training reward. A ranking by evaluation has its name from `best_by`."""


class LearnerRecords(NamedTuple):
    """Records of rank 0, the other half of a checkpoint."""

    ledger: Ledger
    buffer: RolloutBuffer
    scores: Callable[[], Mapping[int, float | None]]
    """Evaluation scores by step; None for a score that is not known yet."""


class Checkpoints(CheckpointWriter):
    """Checkpoints of one run, on every rank. Only rank 0 has the records and prunes."""

    def __init__(
        self, trainer: PolicyTrainer, directory: Path, records: LearnerRecords | None, newest_step: int | None
    ) -> None:
        """Start with `newest_step`, the step of the checkpoint that the run resumed from."""
        super().__init__(trainer, directory)
        self._records, self._newest_step = records, newest_step
        self._rewards: list[float] = []
        """Mean reward of each step since the newest checkpoint."""

    def after_step(self, step: int, metrics: dict[str, float]) -> None:
        """Save a checkpoint if one is due after this step."""
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        if step % self._trainer.config.checkpoint.every_steps == 0:
            self.save(step)

    def save(self, step: int) -> None:
        """Start a checkpoint, unless the newest one is of this step.

        When the checkpoint is complete, obsolete ones are removed.

        Raises:
            DiskError: This checkpoint or the previous one could not be written.
            DeadlineExceeded: The previous checkpoint took too long.
        """
        if step == self._newest_step:
            return
        reward_mean = statistics.fmean(self._rewards) if self._rewards else None
        pass_rates = self._records.buffer.pass_rates() if self._records is not None else None
        self.begin(step, RunProgress(reward_mean=reward_mean, pass_rates=pass_rates), self._newest_step, self._retain)
        self._newest_step = step
        self._rewards.clear()

    def _retain(self) -> None:
        """Remove obsolete checkpoints and completions, in the background of rank 0.

        Nothing is removed before the newest checkpoint is complete.
        """
        assert self._records is not None
        config = self._trainer.config.checkpoint
        with writing(self._directory):
            scores = self._records.scores() if config.is_by_evaluation else None
            oldest_step = prune(self._directory, config.keep_last, config.keep_best, scores, config.best_by)
        self._records.ledger.forget_payloads(oldest_step)


def prune(
    directory: Path,
    keep_last: int,
    keep_best: int,
    scores: Mapping[int, float | None] | None = None,
    evaluation: str = EVALUATION,
) -> int:
    """Remove obsolete checkpoints; return the step of the oldest one for a resume.

    The newest checkpoints stay whole; of the best, only the models stay.

    `scores` are evaluation scores by step, which then rank the checkpoints. A checkpoint that waits for its
    score stays whole. `evaluation` names the evaluated set. A model that was judged otherwise, by another set or
    other questions, stays but is not compared.
    """
    states = {checkpoint: read_state(checkpoint) for checkpoint in complete_checkpoints(directory)}
    newest = list(states)[-keep_last:]  # -0: all
    judged_by = TRAINING_REWARD if scores is None else evaluation
    judged, awaited = _judge(directory, states, scores, judged_by)
    best = sorted(judged, key=lambda path: (judged[path].score, judged[path].step), reverse=True)[:keep_best]
    kept = {*newest, *best, *(awaited if keep_best else ())}
    for checkpoint in (states.keys() | judged.keys()) - kept:
        log.info("removing %s", checkpoint)
        remove_checkpoint(checkpoint)
    for checkpoint in set(best) - set(newest):
        if checkpoint in states:
            score = judged[checkpoint].score
            log.info("keeping only the model of %s (among the best by %s: %.4g)", checkpoint, judged_by, score)
        keep_model_alone(checkpoint, judged[checkpoint])
    return states[newest[0]].step


def _judge(
    directory: Path, states: Mapping[Path, CheckpointState], scores: Mapping[int, float | None] | None, judged_by: str
) -> tuple[dict[Path, BestCheckpoint], set[Path]]:
    """Return the judged models, and the checkpoints that wait for their score."""
    judged = {
        path: best
        for path, best in best_models(directory).items()
        if best.judged_by == judged_by and (scores is None or best.step in scores)
    }
    awaited: set[Path] = set()
    for path, state in states.items():
        if not (path / "model").is_dir():
            continue
        score = state.reward_mean if scores is None else scores.get(state.step)
        if score is not None:
            judged[path] = BestCheckpoint(step=state.step, score=score, judged_by=judged_by)
        elif scores is not None and state.step in scores:
            awaited.add(path)
    return judged, awaited
