"""A run directory with checkpoints of a moved policy, metrics and evaluations, made without a server."""

from pathlib import Path
from typing import Any

import msgspec
from accelerate import Accelerator

from learner.config import LearnerRun
from learner.evaluation.results import FILE, Estimate, Evaluation, record_evaluation
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import STATE_FILE, BestCheckpoint, CheckpointState, keep_model_alone
from learner.storage.run_dir import open_run_dir
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from tests.learner.checkpoints import save
from tests.learner.policy.tiny_policy import move
from tests.learner.report.synthetic_run import write_run
from tests.learner.runs import make_run


def start(tmp_path: Path, dtype: str = "float32", **learner: Any) -> LearnerRun:
    """Write the config of a run."""
    run = msgspec.structs.replace(make_run(tmp_path, "tcp://127.0.0.1:1", **learner), dtype=dtype)
    directory = open_run_dir(run, resume=False)
    write_run(directory.path, steps=30)
    directory.begin()
    directory.close()
    return run


def train(run: LearnerRun, accelerator: Accelerator, *steps: int) -> PolicyTrainer:
    """Write a checkpoint after each of the steps, with other weights in each."""
    trainer = make_trainer(RunInputs(run), accelerator, is_new=True)
    for step in steps:
        move(trainer.policy, seed=step, scale=0.05)
        save(trainer, run.checkpoint_dir, step)
    return trainer


def empty_checkpoint(run: LearnerRun, step: int, reward: float | None = None) -> Path:
    """Write a checkpoint that has only its state."""
    path = run.checkpoint_dir / f"step-{step:06d}"
    path.mkdir()
    state = CheckpointState(step=step, version=step, reference=None, kl_coef=0.0, reward_mean=reward)
    (path / STATE_FILE).write_bytes(msgspec.json.encode(state))
    return path


def reduce_to_model(run: LearnerRun, step: int, score: float, judged_by: str = "training reward") -> Path:
    """Leave of a checkpoint what stays of one of the best."""
    path = run.checkpoint_dir / f"step-{step:06d}"
    keep_model_alone(path, BestCheckpoint(step=step, score=score, judged_by=judged_by))
    return path


def evaluate(run: LearnerRun, step: int, reward: float, set_name: str | None = None, **changes: Any) -> None:
    """Record an evaluation of two prompts."""
    made = Evaluation(
        time=0.0, step=step, set_name=set_name, data="dataset 'openai/gsm8k'", questions_digest=f"of {set_name}",
        url="http://me:secret@10.1.2.3/v1", model="run", versions=(step, step), num_prompts=2, num_samples=4,
        temperature=0.7, seconds=1.0, reward=Estimate(reward, reward - 0.1, reward + 0.1),
        functions={"exact_match": Estimate(reward)}, pass_at={"exact_match": {"4": Estimate(1 - reward)}},
        majority=None, reward_finished=None, truncated_frac=0.0, length_mean=3.0, rewards_P=[reward, reward],
    )  # fmt: skip
    record_evaluation(Path(run.run_dir) / FILE, msgspec.structs.replace(made, **changes))
