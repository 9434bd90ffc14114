"""Reward functions that each break their contract in a different way."""

import time


def raises(completions, **kwargs):
    raise ValueError("no such answer")


def raises_for_two_tokens(completions, completion_ids, **kwargs):
    if min(map(len, completion_ids)) == 2:
        raise ValueError("cannot score that")
    return [0.0] * len(completions)


def slow(completions, **kwargs):
    time.sleep(0.5)
    return [0.0] * len(completions)
