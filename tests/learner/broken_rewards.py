"""Reward functions that break their contract, each in its own way."""


def raises(completions, **kwargs):
    raise ValueError("no such answer")


def wrong_length(completions, **kwargs):
    return [1.0]


def never_returns(completions, **kwargs):
    while True:
        pass
