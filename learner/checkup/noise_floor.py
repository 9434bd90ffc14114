"""The noise floor: how far apart server and learner are about the same tokens under the same weights. Pure.

Between the two sides' logprobs and self_test.py, which samples them and says what the numbers mean.
Suffixes: N tokens of all completions, one completion after the other; C completions.
"""

from typing import Literal

import msgspec
import numpy as np

from learner.config import LearnerConfig

TRUSTED_RATIO = (0.9, 1.1)

Level = Literal["token", "sequence", "geometric", "probability"]


class ComparedTokens(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The tokens of completions that both sides have given a logprob."""

    logprobs_N: np.ndarray
    """The learner's, float64."""
    behaviour_logprobs_N: np.ndarray
    """The server's, float64, finite."""
    is_held_N: np.ndarray
    """Whether the objective's bound holds back the token's gradient."""
    is_fresh_N: np.ndarray
    """Whether no push came between the entry of the completion's prompt into the engine and its last token."""
    completion_N: np.ndarray
    """The index of the token's completion, from 0."""
    num_not_finite: int
    """Tokens that are not here, because a side gave them a logprob that is no number."""


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """The noise of some tokens. The ratio is exp(learner's logprob - server's); without noise it is 1."""

    num_tokens: int
    abs_logprob_mean: float
    abs_logprob_max: float
    ratio_mean: float
    ratio_std: float
    ratio_min: float
    ratio_max: float
    outside_frac: float
    """Share of the tokens whose ratio lies outside TRUSTED_RATIO."""
    mismatch_kl: float
    """k3: the mean of ratio - 1 - log ratio."""
    clipped_frac: float
    """Share of the tokens whose gradient the run's objective holds back."""
    ess: float
    """Effective sample size as a share: (Σ ratio)² / (N Σ ratio²)."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """A bound of the loss, and how the noise compares with it."""

    key: str
    value: float
    distance: float
    """From what a token has without noise (ratio 1, no difference of probabilities) to the bound."""
    level: Level
    noise: float
    """The mean distance that the noise alone brings a token, at the bound's level."""


def floor(tokens: ComparedTokens, chosen_N: np.ndarray) -> Floor | None:
    """Return the noise of the chosen tokens, None if there are none."""
    if not chosen_N.any():
        return None
    log_ratio_N = (tokens.logprobs_N - tokens.behaviour_logprobs_N)[chosen_N]
    ratio_N = np.exp(log_ratio_N)
    low, high = TRUSTED_RATIO
    return Floor(
        num_tokens=len(ratio_N),
        abs_logprob_mean=float(np.abs(log_ratio_N).mean()),
        abs_logprob_max=float(np.abs(log_ratio_N).max()),
        ratio_mean=float(ratio_N.mean()),
        ratio_std=float(ratio_N.std()),
        ratio_min=float(ratio_N.min()),
        ratio_max=float(ratio_N.max()),
        outside_frac=float(((ratio_N < low) | (ratio_N > high)).mean()),
        mismatch_kl=float((np.expm1(log_ratio_N) - log_ratio_N).mean()),
        clipped_frac=float(tokens.is_held_N[chosen_N].mean()),
        ess=float(ratio_N.sum() ** 2 / (len(ratio_N) * (ratio_N**2).sum())),
    )


def bounds(tokens: ComparedTokens, config: LearnerConfig) -> list[Bound]:
    """Return the bounds of this run's loss that noise can reach: the objective's, the correction's."""
    loss, correction = config.loss, config.correction
    found: list[tuple[str, float, float, Level]] = []
    # To the exact proximal policy the ratio is the learner's own, which has no noise.
    if correction.anchor == "behaviour" or correction.proximal == "log_linear":
        if loss.objective in ("grpo", "gspo"):
            level: Level = "token" if loss.objective == "grpo" else "geometric"
            found += [(f"loss.{key}", value := loss.value(key), value, level) for key in ("clip_low", "clip_high")]
        elif loss.objective == "cispo":
            found.append(("loss.clip_high", value := loss.value("clip_high"), value, "token"))
        elif loss.objective == "dppo":
            found += [(f"loss.{key}", value := loss.value(key), value, "probability") for key in ("tv_low", "tv_high")]
    # A weight that is truncated by noise is wrong by no more than the noise; one that is masked takes its token with it.
    if correction.weight == "mask":
        found.append(("correction.max_weight", correction.weight_bound, correction.weight_bound - 1, correction.level))
        if correction.min_weight is not None:
            distance = 1 - correction.min_weight
            found.append(("correction.min_weight", correction.min_weight, distance, correction.level))
    if correction.sequence_mask is not None:
        found.append(("correction.sequence_mask", correction.sequence_mask, correction.sequence_mask, "geometric"))
    return [
        Bound(key=key, value=value, distance=distance, level=level, noise=noise(tokens, level))
        for key, value, distance, level in found
    ]


def noise(tokens: ComparedTokens, level: Level) -> float:
    """Mean |r - 1|, r the ratio of a token, of a completion (the product) or its geometric mean; or mean |p - p_server|."""
    log_ratio_N = tokens.logprobs_N - tokens.behaviour_logprobs_N
    if level == "token":
        return float(np.abs(np.expm1(log_ratio_N)).mean())
    if level == "probability":
        return float(np.abs(np.exp(tokens.logprobs_N) - np.exp(tokens.behaviour_logprobs_N)).mean())
    _, completion_N, length_C = np.unique(tokens.completion_N, return_inverse=True, return_counts=True)
    log_ratio_C = np.bincount(completion_N, weights=log_ratio_N)
    return float(np.abs(np.expm1(log_ratio_C if level == "sequence" else log_ratio_C / length_C)).mean())
