"""Rewards to advantages. Pure; between scoring and the batch, over all groups of one optimizer step.

Suffixes: _P over the groups (prompts) of the step, _G over the completions of one group. A reward of None is unscorable:
it is left out of every mean and deviation, and its advantage is 0. A group has no signal (`has_signal`) when fewer than
two of its completions are scorable or all scorable ones are equal: all its advantages are 0.
"""

import math
import statistics

import msgspec

from learner.config import AdvantageConfig

STD_EPSILON = 1e-4

Rewards = list[list[float | None]]


class StepRewards(msgspec.Struct, frozen=True):
    """The rewards of one optimizer step: what a function of `learner.advantage.function` gets."""

    rewards_P_G: Rewards
    """The total of each completion; None: it cannot be scored."""
    rewards_by_function_P: list[dict[str, list[float | None]]]
    """Of each group: what each reward function said, by its name."""
    weights: dict[str, float]
    """Of the reward functions in the total."""


def has_signal(
    rewards_G: list[float | None],
    rewards_by_function: dict[str, list[float | None]],
    weights: dict[str, float],
    config: AdvantageConfig,
) -> bool:
    """Return whether a group's rewards tell its completions apart, of those that have a total reward.

    `weights`: of the functions that decide. Their weighted sums must differ or, where advantages are taken one by one, the rewards of
    one function; so too where a function of the user's takes them. A completion for which all of them gave None is left out.
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


def _tells_apart(rewards_G: list[float | None]) -> bool:
    return len({reward for reward in rewards_G if reward is not None}) > 1


def step_advantages(rewards_P_G: Rewards, config: AdvantageConfig) -> list[list[float]]:
    """Return A = (r - baseline) / divisor for every completion of the step.

    baseline mean:           the group's mean                               (GRPO, arXiv 2402.03300)
    baseline leave_one_out:  the mean of the group's others                 (RLOO, arXiv 2402.14740)
    scale group:             the group's standard deviation (Bessel) + 1e-4 (GRPO)
    scale batch:             the deviation over all completions of the step + 1e-4
    scale none:              1                                              (Dr. GRPO, arXiv 2503.20783)
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
    """Return the advantages of each reward function alone, added up by weight, over their deviation in the step + 1e-4.

    Keeps functions with small or rare rewards from drowning in the others' (GDPO; TRL's normalize_then_sum). A completion whose total is
    None is left out for every function.
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
    if not _tells_apart(rewards_G):
        return [0.0] * len(rewards_G)
    scorable = [reward for reward in rewards_G if reward is not None]
    mean = math.fsum(scorable) / len(scorable)
    divisor = statistics.stdev(scorable) + STD_EPSILON if config.scale == "group" else batch_divisor
    if config.baseline == "leave_one_out":
        # r - (sum - r) / (n - 1) = (r - mean) · n / (n - 1)
        divisor *= (len(scorable) - 1) / len(scorable)
    return [0.0 if reward is None else (reward - mean) / divisor for reward in rewards_G]
