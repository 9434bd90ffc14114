"""Where a run tells what it does, besides the console and metrics.jsonl."""

from typing import Literal

from learner.config.section import Section, require
from protocol.config import MayChange


class ReportConfig(Section):
    """What a run tells."""

    trackers: MayChange[tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...]] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, trackio, MLflow; what each needs to know (a key, an
    address) it takes from its own environment variables."""
    project: MayChange[str] = "slipstream"
    """What W&B and trackio call the project, and MLflow the experiment."""
    dashboard_port: MayChange[int] = 8765
    """Port of the live dashboard; 0 turns it off."""
    dashboard_host: MayChange[str] = "127.0.0.1"
    """The address that it listens at, such as 0.0.0.0 in a container. Others than this machine's own let everybody who reaches it read
    metrics, prompts and completions: it has no password."""
    samples_every_steps: MayChange[int] = 10
    """Every how many steps a few completions are written into samples.jsonl, which keeps its head and the newest, 32 MiB at most;
    0: never."""

    def lacking(self) -> dict[str, str]:
        return {} if self.dashboard_port else {"dashboard_host": "dashboard_port"}

    def check(self) -> None:
        require(self.dashboard_host != "", "dashboard_host is empty; leave it out, or name an address")
        require(self.samples_every_steps >= 0, f"samples_every_steps = {self.samples_every_steps} must not be negative")
