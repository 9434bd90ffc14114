"""Soft overlong penalty: an additional reward for length alone.

The functions are pure. `scoring.py` adds the penalty to the functions' rewards. Suffix: _G over the
completions of one group, each a branch.
Invariant: a completion that no function could score stays unscorable.
"""

from collections.abc import Sequence

import msgspec

from learner.config.rewards import OVERLONG
from learner.environments.token_sequence import TokenSequence
from learner.rewards.workers import FunctionRewards, GroupRewards


def overlong_rewards(
    branches: Sequence[TokenSequence], max_tokens: int, buffer_tokens: int, penalty: float
) -> list[float]:
    """Return rewards_G, which fall linearly to -penalty at max_tokens.

    They are 0 up to max_tokens - buffer_tokens. This is DAPO's length reward (arXiv 2503.14476 eq. 13). A
    truncated completion gets the whole penalty, however short it is.
    """
    free_tokens = max_tokens - buffer_tokens
    return [
        -penalty
        if branch.finish_reason == "length"
        else penalty * min(0, free_tokens - len(branch.token_ids)) / buffer_tokens
        for branch in branches
    ]


def with_overlong(rewards: GroupRewards, overlong_G: list[float]) -> GroupRewards:
    """Add the penalty to every scorable reward, and list it alongside the functions."""
    scorable_G = [
        None if reward is None else penalty for reward, penalty in zip(rewards.rewards, overlong_G, strict=True)
    ]
    total_G = [
        None if reward is None or penalty is None else reward + penalty
        for reward, penalty in zip(rewards.rewards, scorable_G, strict=True)
    ]
    named = FunctionRewards(name=OVERLONG, rewards=scorable_G)
    return msgspec.structs.replace(rewards, rewards=total_G, functions=[*rewards.functions, named])
