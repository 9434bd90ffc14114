"""Config of a run's outputs: checkpoints, and what it reports besides the console and metrics.jsonl."""

from typing import Literal

from learner.config.section import AtLeastOne, NotNegative, Section, Timeout, require
from protocol.config_keys import MayChange

TRAINING_REWARD, EVALUATION = "training_reward", "evaluation"


class CheckpointConfig(Section):
    """Checkpoints of a run."""

    dir: MayChange[str | None] = None
    """Directory of the checkpoints. Unset: `checkpoints` in `run_dir`. With ranks on several nodes, set a
    directory on a file system that all of them share; `run_dir` stays on a local disk of rank 0. A run needs
    a directory of its own."""
    every_steps: MayChange[AtLeastOne[int]] = 50
    """Steps between checkpoints. One is always written at the end."""
    keep_last: MayChange[NotNegative[int]] = 2
    """Number of newest checkpoints to keep. 0: all. A resume uses the newest, or any of these if you remove
    newer ones. While a checkpoint is written, there is one more."""
    keep_best: MayChange[NotNegative[int]] = 1
    """Number of best checkpoints, by `best_by`, whose `model/` stays regardless of age, without the files
    that only a resume needs. `best.json` next to it has the score."""
    best_by: MayChange[str] = "training_reward"
    """Ranking of checkpoints, highest first. "training_reward": mean reward over the steps since the previous
    checkpoint; "evaluation": mean reward of the evaluation after the checkpoint's step; "evaluation/NAME":
    that of one of several sets."""
    export_model: MayChange[bool] = True
    """Whether to also write the policy to each checkpoint as `model/`, for `vllm serve` and
    `from_pretrained`. It has the run's dtype, with the adapter merged."""
    timeout_s: MayChange[Timeout] = 1800.0
    """Maximum total time of a checkpoint. It is written concurrently with training, but the next one and the
    end of the run wait for it."""

    def unmet_needs(self) -> dict[str, str]:
        idle = {} if self.keep_best else {"best_by": "keep_best above 0"}
        return idle if self.export_model else idle | {"keep_best": "export_model = true"}

    @property
    def judging_set(self) -> str | None:
        """Name of the evaluation set that ranks checkpoints, or None for a single set."""
        return self.best_by.removeprefix(EVALUATION).removeprefix("/") or None if self.is_by_evaluation else None

    @property
    def is_by_evaluation(self) -> bool:
        return self.best_by != TRAINING_REWARD

    def check(self) -> None:
        require(self.dir != "", "dir is empty; remove it, or set a directory")
        require(
            self.best_by in (TRAINING_REWARD, EVALUATION) or self.best_by.startswith(f"{EVALUATION}/"),
            f'best_by = "{self.best_by}" is not a known ranking; use "{TRAINING_REWARD}", "{EVALUATION}", or with '
            f'several sets "{EVALUATION}/NAME"',
        )


class ReportConfig(Section):
    """Outputs of a run: trackers, dashboard and samples."""

    trackers: MayChange[tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...]] = ("tensorboard",)
    """Trackers that receive metrics besides metrics.jsonl: TensorBoard, Weights & Biases, trackio, MLflow.
    Each reads its settings, such as a key or an address, from its own environment variables."""
    project: MayChange[str] = "slipstream"
    """Name of the project in W&B and trackio, and of the experiment in MLflow."""
    dashboard_port: MayChange[int] = 8765
    """Port of the live dashboard. 0: no dashboard."""
    dashboard_host: MayChange[str] = "127.0.0.1"
    """Address of the dashboard, such as 0.0.0.0 in a container. The dashboard has no password: beyond this
    machine, anyone who reaches it can read metrics, prompts and completions."""
    samples_every_steps: MayChange[NotNegative[int]] = 10
    """Steps between samples of a few completions in samples.jsonl. The file keeps its first and its newest
    samples, at most 32 MiB. 0: never."""

    def unmet_needs(self) -> dict[str, str]:
        return {} if self.dashboard_port else {"dashboard_host": "dashboard_port"}

    def check(self) -> None:
        require(self.dashboard_host != "", "dashboard_host is empty; remove it, or set an address")
