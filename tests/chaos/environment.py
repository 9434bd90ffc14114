"""The built-in guessing game, whose process dies, stops or hangs in the midst of a call when its trap is sprung."""

import os
import signal
import time
from pathlib import Path

from learner.environments.guess import Guess
from tests.chaos.traps import Traps

CHAOS_DIR = "SLIPSTREAM_TEST_CHAOS_DIR"
"""The environment variable of the learner's process that says where the trap is."""
FOREVER_S = 3600.0


class DoomedGuess(Guess):
    def __init__(self) -> None:
        super().__init__()
        self._traps = Traps(Path(os.environ[CHAOS_DIR]), "environment")

    def guess(self, text: str) -> str:
        """Dozens of processes share a trap: each counts its own visits, and one takes it away."""
        if self._traps.is_sprung("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._traps.is_sprung("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if self._traps.is_sprung("hang"):
            time.sleep(FOREVER_S)
        return super().guess(text)
