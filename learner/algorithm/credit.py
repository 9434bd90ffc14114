"""Compute the advantage of every turn, from the rewards of turns and episodes. Pure.

    rewards of turns ─▶ returns-to-go G ─▶ G minus a baseline ─▶ advantages by turn ─▶ training/batch.py: by token

Invariant: with credit "turn", the baseline of a turn derives from the other episodes of the group, and from the
rewards that its own episode had before the turn. It cannot depend on the turn's action, so it cancels in the expected
gradient (docs/credit.md).

Suffixes: _P groups (prompts) of the step, _G completions of one group, _K turns of one completion.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from learner.algorithm.advantages import STD_EPSILON, StepRewards, are_equal, combined_advantages, step_advantages
from learner.config import AdvantageConfig

AdvantagesByTurn = list[list[list[float]]]
"""advantages_P_G_K. A single-turn completion has one value."""


def advantages_by_turn(rewards: StepRewards, config: AdvantageConfig) -> AdvantagesByTurn:
    """Return the advantage of every turn of the step, by the config's built-in rules."""
    if config.credit == "turn":
        return turn_advantages(rewards, config)
    if config.combine == "sum":
        advantages_P_G = step_advantages(rewards.rewards_P_G, config)
    else:
        advantages_P_G = combined_advantages(
            rewards.rewards_P_G, rewards.rewards_by_function_P, rewards.weights, config
        )
    if config.credit == "gigpo":
        return gigpo_advantages(rewards, advantages_P_G, config)
    return [
        [[advantage] * len(rewards_K) for advantage, rewards_K in zip(advantages_G, rewards_G_K, strict=True)]
        for advantages_G, rewards_G_K in zip(advantages_P_G, rewards.turn_rewards_P_G_K, strict=True)
    ]


def turn_advantages(rewards: StepRewards, config: AdvantageConfig) -> AdvantagesByTurn:
    """Return A_ik = (G_ik - b_ik) · (n - 1) / n / divisor for turn k of episode i.

        G_ik    return-to-go: r_ik + gamma r_i,k+1 + gamma² r_i,k+2 + …
        b_ik    mean of G_jk over the other episodes j that have a turn k, and of one more value: the mean of their
                G_j0 minus what episode i earned before turn k. This value alone gives credit by episode. It steadies
                the mean where few episodes are left. With gamma < 1 it is discounted to the first turn: then it only
                serves turns without such a j, whose advantage is G_i0 minus the mean of G_j0
        n       number of scorable episodes of the group. The factor (n - 1) / n makes a single-turn completion's
                advantage that of GRPO; baseline "leave_one_out" leaves it out

    The divisor is the standard deviation (Bessel) of the returns of the group or of the step around the mean of their
    turn index, + 1e-4. What distinguishes early from late turns does not count. A mean that includes episode i, or one
    that is summed over the turns that i has, is biased (verl issue 7244).
    """
    returns_P_G_K = _returns(rewards, config)
    of_step = _deviation_by_turn([returns_K for returns_G_K in returns_P_G_K for returns_K in returns_G_K])
    advantages_P_G_K: AdvantagesByTurn = []
    for rewards_G_K, returns_G_K in zip(rewards.turn_rewards_P_G_K, returns_P_G_K, strict=True):
        scorable = [returns_K for returns_K in returns_G_K if returns_K is not None]
        divisor = {"group": _deviation_by_turn(returns_G_K), "batch": of_step, "none": 1.0}[config.scale]
        if config.baseline == "mean":
            divisor *= len(scorable) / max(len(scorable) - 1, 1)
        advantages_P_G_K.append(
            [
                [0.0] * len(rewards_K)
                if returns_K is None
                else [one / divisor for one in _relative_to_others(returns_K, rewards_K, scorable, config.discount)]
                for rewards_K, returns_K in zip(rewards_G_K, returns_G_K, strict=True)
            ]
        )
    return advantages_P_G_K


def gigpo_advantages(
    rewards: StepRewards, advantages_P_G: list[list[float]], config: AdvantageConfig
) -> AdvantagesByTurn:
    """Return A_i + step_weight · A_ik for turn k of episode i        (GiGPO, arXiv 2505.10978).

        A_i     advantage of the episode, `advantages_P_G`
        A_ik    (G_ik - baseline) / divisor, over the turns of the group that began in the same state as turn k.
                The baseline is their mean, or with "leave_one_out" the mean of those of other episodes. The divisor
                is their standard deviation + 1e-4, that of the step as in `turn_advantages`, or 1

    A turn whose state occurs once, or is unknown, has A_ik = 0.
    """
    returns_P_G_K = _returns(rewards, config)
    of_step = _deviation_by_turn([returns_K for returns_G_K in returns_P_G_K for returns_K in returns_G_K])
    total_P_G_K: AdvantagesByTurn = []
    for p, returns_G_K in enumerate(returns_P_G_K):
        total_G_K = [
            [advantage] * len(rewards_K)
            for advantage, rewards_K in zip(advantages_P_G[p], rewards.turn_rewards_P_G_K[p], strict=True)
        ]
        for members in _by_state(rewards.states_P_G_K[p], returns_G_K).values():
            divisor = {"group": _deviation([[value for *_, value in members]]), "batch": of_step, "none": 1.0}
            for i, k, value in members:
                peers = [other for j, _, other in members if j != i or config.baseline == "mean"]
                total_G_K[i][k] += config.step_weight * _difference(value, peers) / divisor[config.scale]
        total_P_G_K.append(total_G_K)
    return total_P_G_K


def tells_turns_apart(rewards: StepRewards, config: AdvantageConfig) -> bool:
    """Return whether any turn has an advantage other than 0."""
    return any(
        any(advantages_K) for advantages_G in advantages_by_turn(rewards, config) for advantages_K in advantages_G
    )


def turn_rewards_differ(rewards: StepRewards) -> bool:
    """Return whether scorable episodes of a group differ in what their turns earned, for a user's advantage function.

    A turn that an episode did not have counts as 0.
    """
    return any(
        not are_equal(rewards_G)
        for totals_G, rewards_G_K in zip(rewards.rewards_P_G, rewards.turn_rewards_P_G_K, strict=True)
        for rewards_G in zip_longest(
            *(rewards_K for total, rewards_K in zip(totals_G, rewards_G_K, strict=True) if total is not None),
            fillvalue=0.0,
        )
    )


def anchored_frac(states_P_G_K: Sequence[list[list[str | None]]]) -> float:
    """Return the share of turns that began in a state in which a turn of another episode of the group began."""
    num_turns = num_anchored = 0
    for states_G_K in states_P_G_K:
        num_episodes = Counter(state for states_K in states_G_K for state in set(states_K))
        states = [state for states_K in states_G_K for state in states_K]
        num_turns += len(states)
        num_anchored += sum(state is not None and num_episodes[state] > 1 for state in states)
    return num_anchored / max(num_turns, 1)


def spread_over_turns(total: float | None, own_K: Sequence[float | None]) -> list[float]:
    """Return rewards of turns that add up to an episode's total reward.

    The last turn gets what the turns' own rewards leave over. All are 0 without a total.
    """
    if total is None:
        return [0.0] * len(own_K)
    rewards_K = [reward or 0.0 for reward in own_K]
    rewards_K[-1] += total - math.fsum(rewards_K)
    return rewards_K


def _returns(rewards: StepRewards, config: AdvantageConfig) -> list[list[list[float] | None]]:
    """Return the returns-to-go of all turns; None: the completion is unscorable."""
    return [
        [
            None if reward is None else _returns_to_go(rewards_K, config.discount)
            for reward, rewards_K in zip(rewards_G, rewards_G_K, strict=True)
        ]
        for rewards_G, rewards_G_K in zip(rewards.rewards_P_G, rewards.turn_rewards_P_G_K, strict=True)
    ]


def _returns_to_go(rewards_K: Sequence[float], gamma: float) -> list[float]:
    returns_K: list[float] = []
    for reward in reversed(rewards_K):
        returns_K.append(reward + (gamma * returns_K[-1] if returns_K else 0.0))
    return returns_K[::-1]


def _relative_to_others(
    returns_K: list[float], rewards_K: list[float], scorable: list[list[float]], gamma: float
) -> list[float]:
    """Return G_ik - b_ik for the turns of an episode. `scorable`: the returns of all episodes, itself included."""
    others = [other_K for other_K in scorable if other_K is not returns_K]
    if not others:
        return [0.0] * len(returns_K)
    remaining = math.fsum(other_K[0] for other_K in others) / len(others)
    advantages_K = []
    for k, (value, reward) in enumerate(zip(returns_K, rewards_K, strict=True)):
        peers = [other_K[k] for other_K in others if len(other_K) > k]
        if gamma < 1 and peers:  # `remaining` is discounted to the first turn, and the peers to this one
            advantages_K.append(_difference(value, peers))
        else:
            advantages_K.append(_difference(gamma**k * value, [*peers, remaining]))
        remaining -= gamma**k * reward
    return advantages_K


def _difference(value: float, peers: Sequence[float]) -> float:
    """Return how far a return is above the mean of its peers, or 0 if there are none or all are equal."""
    return 0.0 if are_equal([value, *peers]) else value - math.fsum(peers) / len(peers)


def _by_state(
    states_G_K: list[list[str | None]], returns_G_K: list[list[float] | None]
) -> dict[str, list[tuple[int, int, float]]]:
    """Return the turns of scorable completions by their state, as (completion, turn, return)."""
    members = defaultdict(list)
    for i, (states_K, returns_K) in enumerate(zip(states_G_K, returns_G_K, strict=True)):
        for k, (state, value) in enumerate(zip(states_K, returns_K or (), strict=False)):
            if state is not None:
                members[state].append((i, k, value))
    return members


def _deviation_by_turn(returns_G_K: list[list[float] | None]) -> float:
    """Return the standard deviation of returns around the mean of their turn index."""
    by_turn = zip_longest(*(returns_K for returns_K in returns_G_K if returns_K is not None))
    return _deviation([[value for value in returns if value is not None] for returns in by_turn])


def _deviation(groups: list[list[float]]) -> float:
    """Return the standard deviation (Bessel) of values around the mean of their group, + STD_EPSILON."""
    squares = [statistics.pvariance(values) * len(values) for values in groups]
    return math.sqrt(math.fsum(squares) / max(sum(map(len, groups)) - 1, 1)) + STD_EPSILON
