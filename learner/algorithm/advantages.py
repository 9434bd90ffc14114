"""Compute the advantages of all groups of one optimizer step from their rewards. Pure.

None as a reward marks an unscorable completion. Means and deviations leave it out, and its advantage is 0. A
group has no signal (`has_signal`) when fewer than two of its completions are scorable, or all scorable
rewards are equal. All its advantages are then 0.

Suffixes: _P over the groups (prompts) of the step, _G over the completions of one group, _K over the turns of one
completion (credit.py).
"""

import math
import statistics
from collections.abc import Iterable

import msgspec

from learner.config import AdvantageConfig

STD_EPSILON = 1e-4

Rewards = list[list[float | None]]


class StepRewards(msgspec.Struct, frozen=True):
    """Rewards of one optimizer step, as passed to `learner.advantage.function`."""

    rewards_P_G: Rewards
    """Total reward of each completion; None: unscorable."""
    rewards_by_function_P: list[dict[str, list[float | None]]]
    """Rewards of each group, by the name of the reward function."""
    weights: dict[str, float]
    """Weight of each reward function in the total."""
    turn_rewards_P_G_K: list[list[list[float]]]
    """Reward of each turn. Those of a completion add up to its total. A plain completion has one turn."""
    states_P_G_K: list[list[list[str | None]]]
    """Name of the state in which each turn began, equal within a group for equal states. None: unknown."""


def has_signal(
    rewards_G: list[float | None],
    rewards_by_function: dict[str, list[float | None]],
    weights: dict[str, float],
    config: AdvantageConfig,
) -> bool:
    """Return whether the rewards of a group distinguish its completions.

    `weights` are those of the functions that decide; functions of weight 0 are ignored. The weighted sums of
    the rewards must differ. With `combine` other than `sum`, or with a user's advantage function, it is
    enough that the rewards of one function differ. Completions without a total reward are left out, and so
    are completions for which every weighted function returned None.
    """
    scorable = _scorable(rewards_by_function, rewards_G)
    weighed = {name: weight for name, weight in weights.items() if weight != 0}
    if config.combine != "sum" or config.function is not None:
        return any(_tells_apart(scorable[name]) for name in weighed)
    terms_G = [
        [weight * reward for name, weight in weighed.items() if (reward := scorable[name][i]) is not None]
        for i in range(len(rewards_G))
    ]
    return _tells_apart([sum(terms) if terms else None for terms in terms_G])


def are_equal(values: Iterable[float]) -> bool:
    """Return whether values differ by rounding at most, as sums of the same rewards in another order do."""
    ordered = sorted(values) or [0.0]
    return math.isclose(ordered[0], ordered[-1], rel_tol=1e-9, abs_tol=1e-12)


def _tells_apart(rewards_G: list[float | None]) -> bool:
    return not are_equal(reward for reward in rewards_G if reward is not None)


def step_advantages(rewards_P_G: Rewards, config: AdvantageConfig) -> list[list[float]]:
    """Return A = (r - baseline) / divisor for every completion of the step.

    baseline mean             mean of the group                               (GRPO, arXiv 2402.03300)
    baseline leave_one_out    mean of the group's other completions           (RLOO, arXiv 2402.14740)
    scale group               standard deviation (Bessel) of the group + 1e-4 (GRPO)
    scale batch               standard deviation over all completions of the step + 1e-4
    scale mean                mean of the group                               (MaxRL, arXiv 2602.02710)
    scale none                1                                               (Dr. GRPO, arXiv 2503.20783)
    """
    everything = [reward for rewards_G in rewards_P_G for reward in rewards_G if reward is not None]
    batch_divisor = 1.0
    if config.scale == "batch" and len(everything) > 1:
        batch_divisor = statistics.stdev(everything) + STD_EPSILON
    return [_group_advantages(rewards_G, config, batch_divisor) for rewards_G in rewards_P_G]


def combined_advantages(
    rewards_P_G: Rewards,
    rewards_by_function_P: list[dict[str, list[float | None]]],
    weights: dict[str, float],
    config: AdvantageConfig,
) -> list[list[float]]:
    """Return the weighted sum of each function's advantages, normalized over the step.

    The sum is divided by its standard deviation over the step + 1e-4. Functions with small or rare rewards
    keep their influence this way (GDPO; TRL's normalize_then_sum). A completion whose total is None is left
    out for every function.
    """
    pairs = zip(rewards_by_function_P, rewards_P_G, strict=True)
    rewards_by_function_P = [_scorable(rewards, rewards_G) for rewards, rewards_G in pairs]
    total_P_G = [[0.0] * len(next(iter(rewards.values()))) for rewards in rewards_by_function_P]
    for name, weight in weights.items():
        if weight == 0:
            continue
        advantages_P_G = step_advantages([rewards[name] for rewards in rewards_by_function_P], config)
        for total_G, advantages_G in zip(total_P_G, advantages_P_G, strict=True):
            total_G[:] = [total + weight * advantage for total, advantage in zip(total_G, advantages_G, strict=True)]
    everything = [total for total_G in total_P_G for total in total_G]
    divisor = statistics.pstdev(everything) + STD_EPSILON
    return [[total / divisor for total in total_G] for total_G in total_P_G]


def _scorable(
    rewards_by_function: dict[str, list[float | None]], rewards_G: list[float | None]
) -> dict[str, list[float | None]]:
    return {
        name: [None if total is None else reward for reward, total in zip(rewards, rewards_G, strict=True)]
        for name, rewards in rewards_by_function.items()
    }


def _group_advantages(rewards_G: list[float | None], config: AdvantageConfig, batch_divisor: float) -> list[float]:
    if config.scale == "mean":  # the scorer refuses rewards below 0, except for rounding
        rewards_G = [None if reward is None else max(reward, 0.0) for reward in rewards_G]
    if not _tells_apart(rewards_G):
        return [0.0] * len(rewards_G)
    scorable = [reward for reward in rewards_G if reward is not None]
    mean = math.fsum(scorable) / len(scorable)
    divisor = batch_divisor
    if config.scale == "group":
        divisor = statistics.stdev(scorable) + STD_EPSILON
    elif config.scale == "mean":
        divisor = mean  # above 0: the rewards differ, and none is negative
    if config.baseline == "leave_one_out":
        # r - (sum - r) / (n - 1) = (r - mean) · n / (n - 1)
        divisor *= (len(scorable) - 1) / len(scorable)
    return [0.0 if reward is None else (reward - mean) / divisor for reward in rewards_G]
