"""Means with the interval in which they lie: what an evaluation may claim. Pure.

Samples of one problem are alike, so problems are what is counted: with several samples each the interval is of the problems' means.

Suffixes: P problems, K samples of each; nan where there is no value.
"""

import math
from statistics import NormalDist

import msgspec
import numpy as np

from learner.rewards.builtin.answers import short_answer

LEVEL = 0.95


class Estimate(msgspec.Struct, frozen=True):
    """Example: mean=0.51, low=0.47, high=0.55. Without an interval where one problem is all there is, or all have the same value."""

    mean: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f"  [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.mean:.4g}{interval}"


def estimate(values_PK: np.ndarray) -> Estimate | None:
    """Of the mean over problems that have a value; None if none has."""
    means_P = problem_means(values_PK)
    means_P = means_P[~np.isnan(means_P)]
    if not len(means_P):
        return None
    # Also where several samples never differed: their deviation of 0 would claim certainty.
    if is_binary(values_PK) and is_binary(means_P):
        return wilson(float(means_P.sum()), len(means_P))
    return of_means(means_P)


def is_binary(values: np.ndarray) -> bool:
    """Whether those that there are say right or wrong, and nothing else."""
    return set(np.unique(values[~np.isnan(values)])) <= {0.0, 1.0}


def problem_means(values_PK: np.ndarray) -> np.ndarray:
    """Over the samples that have a value; nan without any."""
    counts_P = (~np.isnan(values_PK)).sum(axis=1)
    sums_P = np.nansum(values_PK, axis=1)
    return np.divide(sums_P, counts_P, out=np.full(len(values_PK), np.nan), where=counts_P > 0)


def wilson(num_right: float, count: int) -> Estimate:
    """Of a share (Wilson, 1927, JASA 22: 209-212): the shares p with |num_right/count - p| ≤ z √(p(1-p)/count)."""
    z, share = NormalDist().inv_cdf((1 + LEVEL) / 2), num_right / count
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return Estimate(share, max(0.0, centre - half), min(1.0, centre + half))


def of_means(values_P: np.ndarray) -> Estimate:
    """Student's interval of the mean of independent values, such as the problems' means or their differences.

    Of values that are all the same there is none: they do not tell how far others may lie.
    """
    mean, count = float(values_P.mean()), len(values_P)
    deviation = float(values_P.std(ddof=1)) if count > 1 else 0.0
    if deviation == 0:
        return Estimate(mean)
    half = t_quantile(count - 1) * deviation / math.sqrt(count)
    return Estimate(mean, mean - half, mean + half)


def t_quantile(num_free: int) -> float:
    """Of Student's distribution at (1 + LEVEL) / 2: exact for 1 and 2 degrees of freedom, else Abramowitz and Stegun 26.7.5."""
    p = (1 + LEVEL) / 2
    if num_free == 1:
        return math.tan(math.pi * (p - 0.5))
    if num_free == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z, n = NormalDist().inv_cdf(p), num_free
    terms = (
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4),
    )
    return z + sum(terms)


def pass_at(k: int, values_PK: np.ndarray) -> np.ndarray:
    """For each problem the probability that one of k samples is right, without bias: 1 - C(K-c, k) / C(K, k) (arXiv 2107.03374, eq. 1).

    K is the number of its samples that have a value; nan where these are fewer than k.
    """
    num_rated_P, num_right_P = (~np.isnan(values_PK)).sum(axis=1), (values_PK == 1).sum(axis=1)
    return np.array(
        [
            1 - math.comb(rated - right, k) / math.comb(rated, k) if rated >= k else math.nan
            for rated, right in zip(num_rated_P.tolist(), num_right_P.tolist(), strict=True)
        ]
    )


def of_majority(texts_PK: list[list[str]], values_PK: np.ndarray) -> np.ndarray:
    """For each problem the value of the answer that was given most often, however it was come to; of several the one that came first."""
    majority_P = []
    for texts, values in zip(texts_PK, values_PK, strict=True):
        answers = [short_answer(text) for text in texts]
        majority_P.append(values[answers.index(max(answers, key=answers.count))])
    return np.array(majority_P)
