"""Confidence intervals, checked by simulation and published examples; and pass@k, checked by enumeration."""

import itertools

import mpmath
import numpy as np
import pytest

from learner.evaluation.results import Estimate, estimate, majority_values, mean_estimate, pass_at, t_quantile, wilson

NUM_EVALUATIONS = 2000


@pytest.mark.parametrize(
    ("num_right", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_equals_newcombes_table(num_right: int, count: int, low: float, high: float) -> None:
    """Newcombe, 1998, Statistics in Medicine 17: 857-872, table I, method 3."""
    found = wilson(num_right, count)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_the_interval_of_a_paired_difference_equals_students_example() -> None:
    """The sleep of ten patients under two drugs (Student, 1908), with the result of R's t.test(paired = TRUE)."""
    first = np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
    second = np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
    found = mean_estimate(second - first)
    assert found.mean == pytest.approx(1.58)
    assert (found.low, found.high) == (pytest.approx(0.7001142, abs=1e-4), pytest.approx(2.4598858, abs=1e-4))


@pytest.mark.parametrize("num_free", [1, 2, 3, 4, 7, 20, 100, 5000])
def test_students_quantile_has_the_correct_probability(num_free: int) -> None:
    t = t_quantile(num_free)
    tail = mpmath.betainc(num_free / 2, 0.5, 0, num_free / (num_free + t**2), regularized=True) / 2
    assert float(tail) == pytest.approx(0.025, rel=5e-3)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_intervals_of_shares_cover_in_95_of_100_evaluations(share: float) -> None:
    draws = np.random.default_rng(0).random((NUM_EVALUATIONS, 100)) < share
    found = [estimate(draw[:, None].astype(float)) for draw in draws]
    assert 0.93 <= covered(found, share) <= 0.97


def test_a_mean_of_0_or_1_is_not_a_share_if_rewards_are_not_binary() -> None:
    balanced = np.tile([-1.0, 1.0], (20, 1))
    assert estimate(balanced) == Estimate(0.0), "Wilson's interval would be [0, 0.161]"
    varied = np.array([[1.0, 1.0]] * 10 + [[-1.0, 1.0]] * 9 + [[0.5, 1.5]])
    assert estimate(varied) == mean_estimate(varied.mean(axis=1))
    assert estimate(np.ones((20, 2))) == wilson(20, 20)


def test_only_intervals_over_problems_have_correct_coverage() -> None:
    generator = np.random.default_rng(1)
    shares = generator.beta(0.5, 0.5, (NUM_EVALUATIONS, 100))  # most problems are solved almost always or almost never
    draws = (generator.random((NUM_EVALUATIONS, 100, 4)) < shares[:, :, None]).astype(float)
    assert 0.93 <= covered([estimate(draw) for draw in draws], 0.5) <= 0.97
    assert covered([mean_estimate(draw.ravel()) for draw in draws], 0.5) < 0.85, "samples of one problem are correlated"


def covered(found: list[Estimate | None], truth: float) -> float:
    return float(np.mean([one.low <= truth <= one.high for one in found]))


def test_pass_at_k_equals_an_enumeration_of_all_choices_of_k_samples() -> None:
    is_right_PK = np.random.default_rng(2).random((5, 6)) < 0.4
    for k in range(1, 7):
        by_choice = [np.mean([any(chosen) for chosen in itertools.combinations(row, k)]) for row in is_right_PK]
        assert pass_at(k, is_right_PK.astype(float)) == pytest.approx(by_choice)


def test_an_unscored_sample_affects_only_its_own_pass_at_k() -> None:
    nan = np.nan
    values_PK = np.array([[1.0, 0.0, nan, 0.0], [nan, nan, nan, 1.0], [nan] * 4])
    assert pass_at(1, values_PK) == pytest.approx([1 / 3, 1.0, nan], nan_ok=True)
    assert pass_at(2, values_PK) == pytest.approx([2 / 3, nan, nan], nan_ok=True)


def test_unscored_samples_do_not_count() -> None:
    nan = np.nan
    found = estimate(np.array([[1.0, nan], [0.5, 0.7], [nan, nan]]))
    assert found is not None and found.mean == pytest.approx(0.8) and found.high is not None and found.high > 1
    assert estimate(np.array([[nan], [nan]])) is None
    assert estimate(np.array([[0.3]])) == Estimate(0.3)
    assert mean_estimate(np.zeros(50)) == Estimate(0.0) and str(Estimate(0.0)) == "0", "equal differences"


def test_the_majority_is_the_most_frequent_answer_and_the_first_of_ties() -> None:
    texts = [["7", " 8", "8 "], ["1", "2", "3"]]
    assert majority_values(texts, np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])).tolist() == [1.0, 1.0]
    texts = [
        ["<think>first</think>so \\boxed{8}", "I guess \\boxed{7}.", "it must be \\boxed{8}"],
        ["one way: 3", "The answer is 4.", "#### 4"],
    ]
    assert majority_values(texts, np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]])).tolist() == [1.0, 1.0]


def test_texts_without_an_answer_have_no_vote_but_a_problem_without_answers_counts() -> None:
    unfinished = ["<think>a", "<think>b", "<think>c"]
    texts = [[*unfinished, "\\boxed{4}", "\\boxed{4}"], [*unfinished, "5", "4"], [*unfinished, "<think>d", ""]]
    values = np.array([[0.0, 0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 1.0], [0.0] * 5])
    assert majority_values(texts, values).tolist() == [1.0, 0.0, 0.0]
