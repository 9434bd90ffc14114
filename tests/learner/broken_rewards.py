"""Reward functions that break their contract, each in its own way."""

import os
import time
from pathlib import Path


def raises(completions, **kwargs):
    raise ValueError("no such answer")


def wrong_length(completions, **kwargs):
    return [1.0]


def slow_once(completions, **kwargs):
    """Too slow for the first group it ever sees; the file outlives the process that is killed for it."""
    flag = Path(os.environ["PYTEST_CURRENT_TEST_DIR"]) / "slow_once"
    if not flag.exists():
        flag.touch()
        time.sleep(60)
    return [0.0] * len(completions)


def never_returns(completions, **kwargs):
    while True:
        pass
