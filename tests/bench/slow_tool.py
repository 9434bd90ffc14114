"""An environment that takes its time over each turn, and does nothing else."""

import time
from typing import Any

SECONDS = 0.05


class SlowTool:
    def reset(self, **row: Any) -> None:
        """Nothing to begin with."""

    def use(self, text: str) -> str:
        time.sleep(SECONDS)
        return ">"

    def get_reward(self) -> float:
        return time.monotonic() % 1  # of no meaning, so that no group is without signal


class QuickTool(SlowTool):
    """The same without a tool's time."""

    def use(self, text: str) -> str:
        return ">"
