"""Advantages, checked with numpy and by hand."""

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithm.advantages import combined_advantages, has_signal, step_advantages
from learner.config import AdvantageConfig

REWARDS_P_G = [[1.0, 0.0, 1.0, 0.0], [3.0, 1.0, 2.0], [0.5, 0.5, 0.5]]


def test_group_scale_divides_by_bessels_deviation_plus_1e_4() -> None:
    for rewards_G, advantages_G in zip(REWARDS_P_G, step_advantages(REWARDS_P_G, AdvantageConfig()), strict=True):
        rewards = np.array(rewards_G)
        assert advantages_G == pytest.approx((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4))


def test_batch_scale_divides_by_the_deviation_of_the_whole_step() -> None:
    everything = np.concatenate(REWARDS_P_G)
    advantages_P_G = step_advantages(REWARDS_P_G, AdvantageConfig(scale="batch"))
    assert advantages_P_G[1] == pytest.approx(np.array([1.0, -1.0, 0.0]) / (everything.std(ddof=1) + 1e-4))


@pytest.mark.parametrize(
    ("rewards", "baseline", "expected"),
    [
        ([3.0, 1.0, 2.0], "mean", [1.0, -1.0, 0.0]),
        ([3.0, 1.0, 2.0], "leave_one_out", [3 - 1.5, 1 - 2.5, 2 - 2.0]),
        ([3.0, None, 1.0], "mean", [1.0, 0.0, -1.0]),
    ],
    ids=["without a scale", "leave one out", "an unscored completion is not in the baseline"],
)
def test_baselines_by_hand(rewards: list[float | None], baseline: str, expected: list[float]) -> None:
    config = AdvantageConfig(scale="none", baseline=baseline)  # type: ignore[arg-type]
    assert step_advantages([rewards], config) == [pytest.approx(expected)]


def test_mean_scale_divides_by_the_mean_of_the_group() -> None:
    rewards_P_G = [[1.0, 0.0, 0.0, 0.0], [0.5, None, 1.0], [0.0, 0.0], [None, 1.0]]
    found = step_advantages(rewards_P_G, AdvantageConfig(scale="mean"))
    assert found == [pytest.approx([3, -1, -1, -1]), pytest.approx([-1 / 3, 0, 1 / 3]), [0, 0], [0, 0]]


@pytest.mark.parametrize("p", ["0.001", "0.125", "0.75"])
@pytest.mark.parametrize("num_samples", [2, 8])
def test_the_expected_gradient_of_mean_scale_is_that_of_a_truncated_log_likelihood(p: str, num_samples: int) -> None:
    """MaxRL: ∇ log p = Σ_k (1 - p)^(k - 1) ∇p, cut off after as many terms as a group has other completions.

    The policy succeeds with probability p = sigmoid(θ), so that ∇p = p (1 - p). The expectation is over the number of
    successes, in 50 digits.
    """
    with mpmath.workdps(50):
        chance = mpmath.mpf(p)
        expected = sum(chance * (1 - chance) ** k for k in range(1, num_samples))
        found = mpmath.mpf(0)
        for num_right in range(num_samples + 1):
            rewards_G = [1.0] * num_right + [0.0] * (num_samples - num_right)
            (advantages_G,) = step_advantages([rewards_G], AdvantageConfig(scale="mean"))
            gradient = sum(a * ((1 - chance) if r else -chance) for a, r in zip(advantages_G, rewards_G, strict=True))
            odds = mpmath.binomial(num_samples, num_right) * chance**num_right
            found += odds * (1 - chance) ** (num_samples - num_right) * gradient / num_samples
        assert abs(found / expected - 1) < 1e-12


@pytest.mark.parametrize(("rewards_G", "expected"), [([1.0, 1 - 0.9 - 0.1], [1.0, -1.0]), ([0.0, -7.4e-9], [0.0, 0.0])])
def test_mean_scale_takes_a_reward_that_is_negative_by_rounding_as_0(
    rewards_G: list[float | None], expected: list[float]
) -> None:
    assert step_advantages([rewards_G], AdvantageConfig(scale="mean")) == [expected]


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), min_size=1, max_size=6), min_size=1, max_size=5))
def test_advantages_are_finite_and_sum_to_zero_in_every_group(rewards_P_G: list[list[float | None]]) -> None:
    for scale in ("group", "batch", "none"):
        for advantages_G in step_advantages(rewards_P_G, AdvantageConfig(scale=scale)):  # type: ignore[arg-type]
            assert np.isfinite(advantages_G).all()
            assert sum(advantages_G) == pytest.approx(0.0, abs=1e-6 * (1 + max(map(abs, advantages_G))))


def test_normalize_then_sum_gives_small_and_large_rewards_equal_influence() -> None:
    rewards_by_function = {
        "large": [100.0, 0.0, 0.0, 100.0],
        "small": [0.01, 0.0, 0.01, 0.0],
        "watched": [9.0, 0, 0, 0],
    }
    weights = {"large": 1.0, "small": 1.0, "watched": 0.0}
    (advantages_G,) = combined_advantages(
        [[0.0] * len(rewards_by_function["large"])], [rewards_by_function], weights, AdvantageConfig()
    )
    parts = []
    for name in ("large", "small"):
        rewards = np.array(rewards_by_function[name])
        parts.append((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4))
    total = sum(parts)
    assert advantages_G == pytest.approx(total / (total.std() + 1e-4))
    assert advantages_G[0] > 1 and abs(advantages_G[2]) < 0.1 and advantages_G[1] < -1


@pytest.mark.parametrize(
    ("rewards_G", "expected"),
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0, None, 0.5], True),
        ([0.3, 0.3, 0.3], False),
        ([None, 0.7], False),
        ([None, None], False),
        ([0.0, -0.0], False),
    ],
)
def test_a_group_has_signal_when_two_scorable_rewards_differ(rewards_G: list[float | None], expected: bool) -> None:
    assert has_signal(rewards_G, {"f": rewards_G}, {"f": 2.0}, AdvantageConfig()) == expected
    assert any(any(advantages_G) for advantages_G in step_advantages([rewards_G], AdvantageConfig())) == expected


def test_a_missing_reward_of_the_deciding_functions_is_not_a_reward_of_0() -> None:
    rewards = {"judge": [None, 1.0], "other": [1.0, 2.0]}
    assert not has_signal([1.0, 1.0], rewards, {"judge": 1.0}, AdvantageConfig())
    assert has_signal([1.0, 1.0, 1.0], {"judge": [None, 1.0, 0.0]}, {"judge": 1.0}, AdvantageConfig())
    # learner.reward.on_none = "skip": the sum of the other functions
    assert not has_signal(
        [1.0, 3.0], {"judge": [None, 1.0], "other": [2.0, 1.0]}, dict.fromkeys(rewards, 1.0), AdvantageConfig()
    )
    assert has_signal([1.0, 3.0], rewards, dict.fromkeys(rewards, 1.0), AdvantageConfig())


def test_separately_normalized_functions_give_signal_separately() -> None:
    config = AdvantageConfig(combine="normalize_then_sum")
    opposed = {"a": [1.0, 0.0], "b": [0.0, 1.0], "watched": [1.0, 1.0]}
    assert has_signal([1.0, 1.0], opposed, {"a": 1.0, "b": 1.0}, config)
    assert not has_signal([1.0, 1.0], opposed, {"a": 1.0, "b": 1.0}, AdvantageConfig())
    flat = {"a": [1.0, 1.0], "watched": [0.0, 1.0]}
    assert not has_signal([1.0, 1.0], flat, {"a": 1.0, "watched": 0.0}, config)


def test_a_completion_without_a_total_reward_counts_for_no_function() -> None:
    config = AdvantageConfig(combine="normalize_then_sum")
    rewards = {"format": [1.0, 0.0, 0.0], "right": [1.0, 0.0, None]}
    weights = {"format": 1.0, "right": 1.0}
    (advantages_G,) = combined_advantages([[2.0, 0.0, None]], [rewards], weights, config)
    two = {name: values[:2] for name, values in rewards.items()}
    (of_two_G,) = combined_advantages([[2.0, 0.0]], [two], weights, config)
    assert advantages_G[2] == 0 and advantages_G[0] == -advantages_G[1] > 0 and of_two_G[0] > 0
    assert not has_signal([None, None], {"format": [1.0, 0.0], "right": [None, None]}, weights, config)
