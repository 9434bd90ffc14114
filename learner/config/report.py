"""Config of a run's outputs besides the console and metrics.jsonl."""

from typing import Literal

from learner.config.section import NotNegative, Section, require
from protocol.config_keys import MayChange


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
