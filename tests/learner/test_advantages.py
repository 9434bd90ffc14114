"""Advantages by hand: every expected number is worked out in the comment beside it."""

import math

import pytest

from learner.advantages import group_advantages


def test_group_scale_divides_by_bessels_deviation_plus_1e_4() -> None:
    # mean 0.5, squared deviations 4 · 0.25 = 1, / (4 - 1) → std = 0.57735
    scaled = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert group_advantages([1.0, 0.0, 1.0, 0.0], "group") == pytest.approx([scaled, -scaled, scaled, -scaled])


def test_without_scale_only_the_mean_is_subtracted() -> None:
    assert group_advantages([3.0, 1.0, 2.0], "none") == [1.0, -1.0, 0.0]


def test_an_unscorable_completion_is_out_of_the_baseline_and_has_advantage_zero() -> None:
    assert group_advantages([3.0, None, 1.0], "none") == [1.0, 0.0, -1.0]


@pytest.mark.parametrize("rewards", [[0.5, 0.5, 0.5], [None, 0.7, None], [None, None], [0.1 + 0.2, 0.1 + 0.2]])
def test_a_group_without_signal_has_only_zeros(rewards: list[float | None]) -> None:
    assert group_advantages(rewards, "group") == [0.0] * len(rewards)
