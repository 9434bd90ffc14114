"""Credit by turn: its expected gradient, enumerated exactly on a small decision process, and GiGPO by its paper."""

import itertools
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch

from learner.algorithm.advantages import Rewards, StepRewards, step_advantages
from learner.algorithm.credit import (
    AdvantagesByTurn,
    advantages_by_turn,
    anchored_frac,
    spread_over_turns,
    tells_turns_apart,
    turn_advantages,
)
from learner.config import AdvantageConfig

LEAVE_ONE_OUT = AdvantageConfig(credit="turn", baseline="leave_one_out", scale="none")

# ---- a decision process whose policy gradient is known exactly

LOGITS = torch.tensor([[0.4, -0.3], [-0.2, 0.5], [0.1, 0.9], [0.7, -0.6]], dtype=torch.float64)
"""Logits of two actions in four states. Action 0 leads on, action 1 mostly ends the episode."""
GROUP_SIZE = 3


class Outcome(NamedTuple):
    """One possible result of an action."""

    probability: float
    reward: float
    state: int | None
    """The next state. None: the episode ends."""


PROCESS: dict[tuple[int, int], list[Outcome]] = {
    (0, 0): [Outcome(0.7, 0.5, 1), Outcome(0.3, 0.2, 2)],
    (0, 1): [Outcome(1.0, 0.9, None)],
    (1, 0): [Outcome(1.0, -0.4, 3)],
    (1, 1): [Outcome(0.6, 1.0, None), Outcome(0.4, 0.3, 2)],
    (2, 0): [Outcome(1.0, 0.6, None)],
    (2, 1): [Outcome(1.0, -0.2, None)],
    (3, 0): [Outcome(1.0, 1.5, None)],
    (3, 1): [Outcome(1.0, 0.1, None)],
}


class Episode(NamedTuple):
    chance: float
    """Probability of the process's own choices."""
    turns: tuple[tuple[int, int], ...]
    """State and action of each turn."""
    rewards: tuple[float, ...]

    def logprob(self, logits: torch.Tensor) -> torch.Tensor:
        return sum(logits[state].log_softmax(0)[action] for state, action in self.turns)


def episodes_from(state: int) -> list[Episode]:
    found = []
    for action in (0, 1):
        for outcome in PROCESS[state, action]:
            rests = [Episode(1.0, (), ())] if outcome.state is None else episodes_from(outcome.state)
            for rest in rests:
                turns, rewards = ((state, action), *rest.turns), (outcome.reward, *rest.rewards)
                found.append(Episode(outcome.probability * rest.chance, turns, rewards))
    return found


EPISODES = episodes_from(0)


def exact_gradient() -> np.ndarray:
    logits = LOGITS.clone().requires_grad_()
    value = sum(one.chance * one.logprob(logits).exp() * sum(one.rewards) for one in EPISODES)
    return torch.autograd.grad(value, logits)[0].numpy()


def score(state: int, action: int) -> np.ndarray:
    """Return the gradient of the logprob of an action."""
    gradient = np.zeros(LOGITS.shape)
    gradient[state] = -LOGITS[state].softmax(0).numpy()
    gradient[state, action] += 1
    return gradient


Estimator = Callable[[list[Episode]], list[list[float]]]


def expected_gradient(estimate: Estimator) -> np.ndarray:
    """Return the mean over all groups of Σ advantage · ∇ log p / GROUP_SIZE, by enumeration."""
    chances = [one.chance * float(one.logprob(LOGITS).exp()) for one in EPISODES]
    assert sum(chances) == pytest.approx(1)
    scores = {turn: score(*turn) for one in EPISODES for turn in one.turns}
    total = np.zeros(LOGITS.shape)
    for numbers in itertools.product(range(len(EPISODES)), repeat=GROUP_SIZE):
        group = [EPISODES[number] for number in numbers]
        chance = np.prod([chances[number] for number in numbers])
        for one, advantages_K in zip(group, estimate(group), strict=True):
            for turn, advantage in zip(one.turns, advantages_K, strict=True):
                total += chance * advantage * scores[turn] / GROUP_SIZE
    return total


def by_turn(config: AdvantageConfig) -> Estimator:
    def estimate(group: list[Episode]) -> list[list[float]]:
        rewards = step_rewards([[list(one.rewards) for one in group]])
        return advantages_by_turn(rewards, config)[0]

    return estimate


def step_rewards(
    turn_rewards_P_G_K: list[list[list[float]]],
    states_P_G_K: list[list[list[str | None]]] | None = None,
    rewards_P_G: Rewards | None = None,
) -> StepRewards:
    states = states_P_G_K or [[[None] * len(K) for K in G] for G in turn_rewards_P_G_K]
    totals: Rewards = rewards_P_G or [[sum(K) for K in G] for G in turn_rewards_P_G_K]
    by_function = [{"environment_reward": G} for G in totals]
    return StepRewards(totals, by_function, {"environment_reward": 1.0}, turn_rewards_P_G_K, states)


@pytest.mark.parametrize("credit", ["turn", "episode"])
@pytest.mark.parametrize(("baseline", "factor"), [("leave_one_out", 1.0), ("mean", 1 - 1 / GROUP_SIZE)])
def test_the_expected_gradient_is_the_policy_gradient(credit: str, baseline: str, factor: float) -> None:
    """GRPO's mean includes the episode itself, which scales the whole gradient by a constant."""
    config = AdvantageConfig(credit=credit, baseline=baseline, scale="none")  # type: ignore[arg-type]
    np.testing.assert_allclose(expected_gradient(by_turn(config)), factor * exact_gradient(), atol=1e-14)


@pytest.mark.parametrize("gamma", [0.5, 0.9])
def test_a_discounted_gradient_weighs_a_turn_by_whether_another_episode_may_reach_it(gamma: float) -> None:
    """Σ w_k G_ik ∇ log p, with w_k = 1 if another episode reaches turn k and gamma^k if none does."""
    expected = np.zeros(LOGITS.shape)
    chances = [one.chance * float(one.logprob(LOGITS).exp()) for one in EPISODES]
    for chance, one in zip(chances, EPISODES, strict=True):
        for k, turn in enumerate(one.turns):
            ended = sum(other for other, episode in zip(chances, EPISODES, strict=True) if len(episode.turns) <= k)
            is_alone = ended ** (GROUP_SIZE - 1)
            value = sum(gamma**later * reward for later, reward in enumerate(one.rewards[k:]))
            expected += chance * (1 - is_alone + is_alone * gamma**k) * value * score(*turn)
    config = AdvantageConfig(credit="turn", baseline="leave_one_out", scale="none", gamma=gamma)
    np.testing.assert_allclose(expected_gradient(by_turn(config)), expected, atol=1e-14)


def mean_by_index(group: list[Episode]) -> list[list[float]]:
    """Return Σ over the turns from k on of (reward - mean reward of that turn index), as in MT-GRPO (2505.11821)."""
    means = [statistics.fmean(one.rewards[k] for one in group if len(one.rewards) > k) for k in range(3)
             if any(len(one.rewards) > k for one in group)]  # fmt: skip
    centered = [[reward - means[k] for k, reward in enumerate(one.rewards)] for one in group]
    return [[sum(rewards_K[k:]) for k in range(len(rewards_K))] for rewards_K in centered]


def mean_of_survivors(group: list[Episode]) -> list[list[float]]:
    """Return return-to-go minus its mean over the episodes that reached the turn, itself included."""
    returns = [[sum(one.rewards[k:]) for k in range(len(one.rewards))] for one in group]
    return [
        [value - statistics.fmean(other[k] for other in returns if len(other) > k) for k, value in enumerate(of_one)]
        for of_one in returns
    ]


@pytest.mark.parametrize("estimate", [mean_by_index, mean_of_survivors])
def test_naive_baselines_by_turn_are_biased(estimate: Estimator) -> None:
    """Their baseline depends on when the episode ends, so no constant factor makes up for it."""
    found, exact = expected_gradient(estimate), exact_gradient()
    factor = float((found * exact).sum() / (exact**2).sum())
    assert np.linalg.norm(found - factor * exact) > 0.05 * np.linalg.norm(found)


# ---- properties of the advantages


def test_credit_of_single_turn_completions_is_that_of_the_episode() -> None:
    rewards = step_rewards(
        [[[1.0], [0.25], [0.0], [0.0]], [[0.5], [0.5]]], rewards_P_G=[[1.0, 0.25, None, 0.0], [0.5, 0.5]]
    )
    for baseline in ("mean", "leave_one_out"):
        for scale in ("group", "batch", "none"):
            config = AdvantageConfig(credit="turn", baseline=baseline, scale=scale)  # type: ignore[arg-type]
            by_episode_P_G = step_advantages(rewards.rewards_P_G, config)
            for found_G_K, expected_G in zip(turn_advantages(rewards, config), by_episode_P_G, strict=True):
                assert [advantage for (advantage,) in found_G_K] == pytest.approx(expected_G)


def test_a_turn_is_compared_with_the_other_episodes_that_reached_it_and_with_their_mean_return() -> None:
    """The mean return, less what the episode has had, counts as one more episode, and alone where no other is left."""
    found = advantages_by_turn(step_rewards([[[0.5, 0.5, 2.0], [1.0], [0.25, 0.5]]]), LEAVE_ONE_OUT)
    of_first = [3.0 - 0.875, 2.5 - (0.5 + 0.375) / 2, 2.0 - (0.875 - 1.0)]
    assert found == [[of_first, [1.0 - 1.875], [0.75 - 2.0, 0.5 - (2.5 + 1.75) / 2]]]


def test_a_constant_that_is_added_to_the_reward_of_every_episode_changes_no_advantage() -> None:
    rewards_G_K = [[0.5, 0.5, 2.0], [1.0], [0.25, 0.5]]
    shifted_G_K = [[*rewards_K[:-1], rewards_K[-1] + 10] for rewards_K in rewards_G_K]
    for scale in ("none", "group"):
        config = AdvantageConfig(credit="turn", scale=scale)  # type: ignore[arg-type]
        plain, shifted = (advantages_by_turn(step_rewards([G]), config)[0] for G in (rewards_G_K, shifted_G_K))
        for one, other in zip(plain, shifted, strict=True):
            assert one == pytest.approx(other)


def test_rewards_of_turns_may_distinguish_episodes_with_equal_rewards() -> None:
    """Scaled by the deviation of the totals, which is 0, the advantages would be thousands."""
    early, late = [0.9, 0.1], [0.1, 0.9]
    config = AdvantageConfig(credit="turn")
    rewards = step_rewards([[early, late]])
    ((first, second),) = advantages_by_turn(rewards, config)
    assert first[0] == second[0] == 0 and -2 < first[1] < 0 < second[1] < 2
    assert tells_turns_apart(rewards, config) and not tells_turns_apart(step_rewards([[early, early]]), config)


def test_what_all_episodes_earn_in_a_turn_changes_no_advantage_and_no_scale() -> None:
    rewards_G_K = [[0.5, 0.0, 2.0], [1.0, 1.0, 0.0], [0.0, 0.25, 0.5]]
    raised_G_K = [[reward + more for reward, more in zip(K, (5.0, 0.0, -3.0), strict=True)] for K in rewards_G_K]
    for scale in ("group", "batch", "none"):
        config = AdvantageConfig(credit="turn", scale=scale)  # type: ignore[arg-type]
        plain, raised = (advantages_by_turn(step_rewards([G]), config)[0] for G in (rewards_G_K, raised_G_K))
        for one, other in zip(plain, raised, strict=True):
            assert one == pytest.approx(other)


def test_equal_returns_of_episodes_of_different_length_are_no_signal() -> None:
    rewards = step_rewards([[[0.1, 0.2, 0.7], [1.0], [0.3, 0.7]], [[0.0, 0.0], [0.0]]])
    (first_G_K, second_G_K) = advantages_by_turn(rewards, AdvantageConfig(credit="turn", scale="none"))
    assert [K[0] for K in first_G_K] == [0, 0, 0] and second_G_K == [[0, 0], [0]]
    discounted = AdvantageConfig(credit="turn", gamma=0.9)
    assert tells_turns_apart(step_rewards([[[0.0, 1.0], [1.0]]]), discounted)
    assert not tells_turns_apart(step_rewards([[[0.0, 1.0], [1.0]]]), AdvantageConfig(credit="turn"))


def test_equal_discounted_returns_are_no_signal() -> None:
    config = AdvantageConfig(credit="turn", gamma=0.9)
    rewards = step_rewards([[[0.0, 1.0]] * 4, [[0.0, 0.0, 1.0], [0.81], [0.0, 0.9]]])
    assert not tells_turns_apart(rewards, config)


def test_an_unscorable_episode_is_in_no_baseline_and_has_no_advantage() -> None:
    for credit in ("turn", "gigpo"):
        config = AdvantageConfig(credit=credit, scale="none")  # type: ignore[arg-type]
        states: list[list[list[str | None]]] = [[["a", "b"], ["a", "b"], ["a"]]]
        three = step_rewards([[[0.5, 0.5], [0.0, 0.0], [0.0]]], states, [[1.0, None, 0.0]])
        two = step_rewards([[[0.5, 0.5], [0.0]]], [[states[0][0], states[0][2]]])
        ((first, unscorable, last),) = advantages_by_turn(three, config)
        assert unscorable == [0.0, 0.0] and [[first, last]] == advantages_by_turn(two, config)


@pytest.mark.parametrize(
    ("total", "own_K", "expected"),
    [
        (1.0, [None], [1.0]),
        (1.0, [None, None, None], [0.0, 0.0, 1.0]),
        (1.0, [0.25, None, 0.5], [0.25, 0.0, 0.75]),
        (-1.0, [0.5, 0.5], [0.5, -1.5]),
        (None, [0.5, 0.5], [0.0, 0.0]),
    ],
)
def test_rewards_of_turns_add_up_to_the_total(
    total: float | None, own_K: list[float | None], expected: list[float]
) -> None:
    assert spread_over_turns(total, own_K) == expected


# ---- GiGPO


def gigpo_of_the_paper(
    rewards_G_K: list[list[float]], states_G_K: list[list[str]], *, gamma: float, omega: float, has_std: bool
) -> AdvantagesByTurn:
    """Return A^E + omega A^S of one group, with the notation of arXiv 2505.10978."""
    totals = np.array([sum(rewards_K) for rewards_K in rewards_G_K])
    episode = (totals - totals.mean()) / (totals.std(ddof=1) + 1e-4 if has_std else 1)
    steps = [
        (i, state, sum(gamma**later * reward for later, reward in enumerate(rewards_G_K[i][k:])))
        for i, states_K in enumerate(states_G_K)
        for k, state in enumerate(states_K)
    ]
    found: list[list[float]] = [[] for _ in rewards_G_K]
    for i, state, value in steps:
        peers = np.array([other for _, its_state, other in steps if its_state == state])
        norm = peers.std(ddof=1) + 1e-4 if has_std and len(peers) > 1 else 1
        found[i].append(episode[i] + omega * (value - peers.mean()) / norm)
    return [found]


@pytest.mark.parametrize("scale", ["group", "none"])
def test_gigpo_equals_its_paper(scale: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        lengths = rng.integers(1, 6, size=6)
        rewards_G_K = [rng.integers(0, 5, size=length).astype(float).tolist() for length in lengths]
        states_G_K = [["start", *rng.choice(["a", "b", "c", "d"], size=length - 1).tolist()] for length in lengths]
        for keys in ({}, {"gamma": 0.5, "step_weight": 0.25}):
            config = AdvantageConfig(credit="gigpo", scale=scale, **keys)  # type: ignore[arg-type]
            expected = gigpo_of_the_paper(
                rewards_G_K, states_G_K, gamma=keys.get("gamma", 0.95), omega=keys.get("step_weight", 1.0),
                has_std=scale == "group",
            )  # fmt: skip
            found = advantages_by_turn(step_rewards([rewards_G_K], [states_G_K]), config)  # type: ignore[list-item]
            for found_K, expected_K in zip(found[0], expected[0], strict=True):
                assert found_K == pytest.approx(expected_K)


def test_gigpo_compares_a_turn_with_those_of_other_episodes_if_it_leaves_its_own_out() -> None:
    rewards_G_K = [[0.0, 1.0], [0.0, 0.0, 3.0], [2.0]]
    states_G_K: list[list[str | None]] = [["start", "a"], ["start", "a", "a"], ["start"]]
    config = AdvantageConfig(credit="gigpo", baseline="leave_one_out", scale="none", gamma=1.0)
    found = advantages_by_turn(step_rewards([rewards_G_K], [states_G_K]), config)
    episode = [1 - 2.5, 3 - 1.5, 2 - 2.0]
    assert found == [
        [[2 * episode[0], episode[0] + 1 - 3], [2 * episode[1], *[episode[1] + 3 - 1] * 2], [2 * episode[2]]]
    ]


def test_a_turn_whose_state_is_unknown_or_occurs_once_has_the_advantage_of_its_episode() -> None:
    states: list[list[list[str | None]]] = [[["start", None, "once"], ["start", None]]]
    rewards = step_rewards([[[0.0, 0.0, 1.0], [0.0, 0.0]]], states)
    ((first, second),) = advantages_by_turn(rewards, AdvantageConfig(credit="gigpo", scale="none", gamma=1.0))
    assert first == [1.0, 0.5, 0.5] and second == [-1.0, -0.5]
    assert anchored_frac(rewards.states_P_G_K) == pytest.approx(2 / 5) and anchored_frac([]) == 0
