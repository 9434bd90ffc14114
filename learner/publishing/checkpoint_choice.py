"""Choice of the checkpoint to export: the newest, that of a step, or the best by a metric.

    checkpoints/, evaluations.jsonl ─▶ choose_checkpoint ─▶ ChosenCheckpoint ─▶ export.py

Invariant: only checkpoints that are complete, or reduced to their model, are chosen. Scores are compared only
if their evaluations used the same prompts, sampling and rewards.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from learner.config import outputs
from learner.evaluation.results import FILE, earlier, metrics_of
from learner.storage import retention
from learner.storage.checkpoint import best_models, complete_checkpoints, read_state, step_of
from protocol.errors import ConfigError

log = logging.getLogger(__name__)

LATEST, BEST = "latest", "best"


class ChosenCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, and why it was chosen."""

    path: Path
    step: int
    reason: str
    """Example: "best of 3 by evaluation/reward: 0.82"."""


def choose_checkpoint(run_dir: Path, directory: Path, which: str, ranking: str) -> ChosenCheckpoint:
    """Return the checkpoint in `directory` that `which` selects: "latest", "best", or a step.

    `ranking` decides what is best: a value of learner.checkpoint.best_by, or any metric of evaluations.jsonl,
    such as evaluation/hard/pass_at_4/exact_match. Of equal scores, the newer checkpoint is better.

    Raises:
        ConfigError: There is no such checkpoint, or none that has a score.
    """
    available = {step_of(path): path for path in [*best_models(directory), *complete_checkpoints(directory)]}
    if not available:
        raise ConfigError(
            f"{directory} has no complete checkpoint; wait for the first (learner.checkpoint.every_steps), or use the "
            "run directory of another run"
        )
    if which == BEST:
        return _best(run_dir, directory, available, ranking)
    if which == LATEST:
        step = max(available)
        return ChosenCheckpoint(path=available[step], step=step, reason=f"newest of {len(available)}")
    if not which.isdecimal() or int(which) not in available:
        raise ConfigError(
            f"--checkpoint {which}: expected {LATEST}, {BEST}, or the step of a checkpoint in {directory}: "
            f"{_listed(available)}. learner.checkpoint.keep_last and keep_best decide which checkpoints stay"
        )
    return ChosenCheckpoint(path=available[int(which)], step=int(which), reason="chosen by its step")


def _best(run_dir: Path, directory: Path, available: Mapping[int, Path], ranking: str) -> ChosenCheckpoint:
    is_by_reward = ranking == outputs.TRAINING_REWARD
    scores = training_rewards(directory) if is_by_reward else evaluation_scores(run_dir, ranking)
    candidates = [step for step in scores if step in available]
    if not candidates:
        raise ConfigError(
            f"no checkpoint in {directory} has a score by {ranking}: there are checkpoints of the steps "
            f"{_listed(available)}, and scores of the steps {_listed(scores)}. Choose a step, or another ranking "
            "with --best-by"
        )
    best, best_of_run = (max(steps, key=lambda step: (scores[step], step)) for steps in (candidates, scores))
    if best_of_run != best:
        log.warning(
            "step %d has a better %s (%.4g) than step %d (%.4g), but its checkpoint was not kept; set "
            "learner.checkpoint.best_by to keep it in the next run",
            best_of_run, ranking, scores[best_of_run], best, scores[best],
        )  # fmt: skip
    reason = f"best of {len(candidates)} by {ranking}: {scores[best]:.4g}"
    return ChosenCheckpoint(path=available[best], step=best, reason=reason)


def training_rewards(directory: Path) -> dict[int, float]:
    """Return the training reward of each checkpoint that has one, by step."""
    reduced = [best for best in best_models(directory).values() if best.judged_by == retention.TRAINING_REWARD]
    states = [read_state(path) for path in complete_checkpoints(directory)]
    return {best.step: best.score for best in reduced} | {
        state.step: state.reward_mean for state in states if state.reward_mean is not None
    }


def evaluation_scores(run_dir: Path, ranking: str) -> dict[int, float]:
    """Return the metric of each evaluation that can be compared with the newest one, by step.

    Raises:
        ConfigError: No evaluation has such a metric.
    """
    of_run = [(made, metrics_of(made)) for made in earlier(run_dir / FILE) if made.step is not None]
    metric = ranking if any(ranking in metrics for _, metrics in of_run) else f"{ranking}/reward"
    having = [(made, metrics[metric]) for made, metrics in of_run if metric in metrics]
    if not having:
        _refuse_ranking(run_dir, ranking, {name for _, metrics in of_run for name in metrics})
    comparable = having[-1][0].questions_digest
    return {made.step: score for made, score in having if made.step is not None and made.questions_digest == comparable}


def _refuse_ranking(run_dir: Path, ranking: str, known: set[str]) -> NoReturn:
    remedy = (
        f"use {outputs.TRAINING_REWARD}, or one of {', '.join(sorted(known))}"
        if known
        else f"use {outputs.TRAINING_REWARD}, or let the next run evaluate (learner.evaluation.every_steps)"
    )
    raise ConfigError(f"no evaluation in {run_dir / FILE} has the metric {ranking}; {remedy}")


def _listed(steps: Mapping[int, object]) -> str:
    return ", ".join(str(step) for step in sorted(steps)) or "none"
