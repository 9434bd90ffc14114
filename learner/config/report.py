"""Where a run tells what it does, besides the console and metrics.jsonl."""

from typing import Literal

from learner.config.section import Section
from protocol.config import MayChange


class ReportConfig(Section):
    """What a run tells."""

    trackers: MayChange[tuple[Literal["tensorboard"], ...]] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl."""
    dashboard_port: MayChange[int] = 8765
    """Port of the live dashboard on 127.0.0.1; 0 turns it off."""
