"""An environment that only sleeps in each turn."""

import time
from typing import Any

SECONDS = 0.05


class SlowTool:
    def reset(self, **row: Any) -> None:
        """Start without a message."""

    def use(self, text: str) -> str:
        time.sleep(SECONDS)
        return ">"

    def get_reward(self) -> float:
        return time.monotonic() % 1  # arbitrary, so that every group has signal


class QuickTool(SlowTool):
    """The same environment without the delay."""

    def use(self, text: str) -> str:
        return ">"
