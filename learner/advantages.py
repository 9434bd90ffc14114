"""Rewards of one group to advantages. Pure; in between scoring and the batch.

Suffix: _G over the completions of one group.
"""

import math
import statistics
from typing import Literal

STD_EPSILON = 1e-4


def group_advantages(rewards_G: list[float | None], scale: Literal["group", "none"]) -> list[float]:
    """Return A_i = (r_i - mean) / (std + 1e-4), with Bessel's std (GRPO, arXiv 2402.03300 eq. 3); "none": r_i - mean.

    A reward of None is unscorable: it is left out of mean and std and has advantage 0. Fewer than two scorable
    completions, or all rewards equal, give zeros: such a group has no signal.
    """
    scorable = [reward for reward in rewards_G if reward is not None]
    if len(scorable) < 2 or min(scorable) == max(scorable):
        return [0.0] * len(rewards_G)
    mean = math.fsum(scorable) / len(scorable)
    divisor = statistics.stdev(scorable) + STD_EPSILON if scale == "group" else 1.0
    return [0.0 if reward is None else (reward - mean) / divisor for reward in rewards_G]
