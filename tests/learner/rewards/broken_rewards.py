"""Reward functions that break their contract, each in its own way."""

import os
import time
from pathlib import Path


def raises(completions, **kwargs):
    raise ValueError("no such answer")


def raises_for_two_tokens(completions, completion_ids, **kwargs):
    if min(map(len, completion_ids)) == 2:
        raise ValueError("cannot score that")
    return [0.0] * len(completions)


def wrong_length(completions, **kwargs):
    return [1.0]


def slow(completions, **kwargs):
    time.sleep(0.5)
    return [0.0] * len(completions)


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


def raises_once(completions, count_in, **kwargs):
    """Raise at the thirtieth call of all, which ends a run in the middle of a step; the file outlives the run."""
    counter = Path(count_in[0])
    num_calls = int(counter.read_text()) + 1 if counter.exists() else 1
    counter.write_text(str(num_calls))
    if num_calls == 30:
        raise RuntimeError("scripted crash")
    return [0.0] * len(completions)
