"""The noise floor: how far server and learner differ on the same tokens under the same weights, and what that means for the run. Pure.

    self_test.py: logprobs of both sides ─▶ ComparedTokens ─▶ floor, bounds ─▶ Measured ─▶ a table, the bounds, the problems

Invariant: every problem says what was measured, what was expected and what to do; causes come first.

Suffixes: N tokens of all completions, one completion after the other; C completions.
"""

from typing import Literal

import msgspec
import numpy as np

from learner.config import LearnerConfig
from learner.config.algorithm import is_plug_in

TRUSTED_RATIO = (0.9, 1.1)
Level = Literal["token", "sequence", "geometric", "probability"]
SMALLEST_MARGIN = 10.0
"""A bound that is fewer times the noise away acts on the noise."""
NOISE_OF = {
    "token": "|ratio - 1| of a token",
    "sequence": "|ratio - 1| of a completion",
    "geometric": "|ratio - 1| of a completion's geometric mean",
    "probability": "difference of a token's probabilities",
}


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


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the self-test found, and what of the run it is to be compared with."""

    dtype: str
    objective: str
    temperature: float
    parity_bound: float
    num_not_finite: int
    fresh: Floor | None
    through_push: Floor | None
    """Of completions that were in the engine during a push; None: there were none."""
    bounds: list[Bound]
    at_temperature_1: Floor | None = None
    """Of all tokens, had they been sampled at temperature 1; only where they do not fit the run's own temperature."""

    @property
    def columns(self) -> dict[str, Floor]:
        columns = {"fresh": self.fresh, "through a push": self.through_push}
        return {name: tokens for name, tokens in columns.items() if tokens is not None}

    @property
    def disagreeing(self) -> dict[str, Floor]:
        """The columns whose mean |Δ logprob| is above the bound of the parity check (or NaN)."""
        return {name: tokens for name, tokens in self.columns.items() if not self.is_close(tokens)}

    def is_close(self, tokens: Floor) -> bool:
        return tokens.abs_logprob_mean <= self.parity_bound


def problems(measured: Measured) -> list[str]:
    """Return what is wrong; empty: both sides agree, and nothing in the run acts on the noise that is left."""
    found = _disagreements(measured)
    if measured.num_not_finite:
        found.append(
            f"{measured.num_not_finite} tokens have a logprob that is no number on one of the two sides, and the loss would "
            'leave them out; look for inf or NaN in the weights, try dtype = "float32"'
        )
    for name, tokens in measured.columns.items():
        if tokens.clipped_frac > 0:
            found.append(
                f"{tokens.clipped_frac:.2%} of the tokens ({name}) are clipped by {measured.objective} although nothing was "
                'learned; widen the bounds in learner.loss, or set dtype = "float32" on both sides'
            )
    for bound in measured.bounds:
        if bound.distance < SMALLEST_MARGIN * bound.noise:
            found.append(
                f"learner.{bound.key} = {bound.value:g} is only {bound.distance / bound.noise:.1f} times the noise (mean "
                f"{NOISE_OF[bound.level]}: {bound.noise:.1e}), so it acts on noise; widen it to {SMALLEST_MARGIN:.0f} times, "
                'or set dtype = "float32" on both sides'
            )
    return found


def _disagreements(measured: Measured) -> list[str]:
    disagreeing = measured.disagreeing
    if not disagreeing:
        return []
    untempered = measured.at_temperature_1
    if untempered is not None and measured.is_close(untempered):
        worst = max(tokens.abs_logprob_mean for tokens in disagreeing.values())
        return [
            f"the server's logprobs are those of temperature 1 (mean |Δ logprob| {untempered.abs_logprob_mean:.1e}, but "
            f"{worst:.2g} at temperature {measured.temperature:g}): it does not apply learner.sampling.temperature = "
            f"{measured.temperature:g}; install the same slipstream-rl on both sides, or set it to 1"
        ]
    values = ", ".join(f"{tokens.abs_logprob_mean:.2g} ({name})" for name, tokens in disagreeing.items())
    problem = (
        f"server and learner disagree: the mean |Δ logprob| of sampled tokens is {values}, the bound is "
        f"{measured.parity_bound:.2g} for {measured.dtype} (learner.parity.max_mean_abs_logprob)"
    )
    if "fresh" in measured.columns.keys() - disagreeing.keys():
        advice = "only a push of equal weights came between, so the engine kept something wrong: try server.kv_on_push"
    else:
        advice = (
            "the fixed sequences agreed at the start, so it is in what only sampling has: look at temperature, top_p, top_k "
            "and at what the server does to logits before it samples"
        )
    return [f"{problem}; {advice}"]


def as_text(measured: Measured) -> str:
    """The table, and what the noise means for each bound."""
    columns = measured.columns
    low, high = TRUSTED_RATIO
    rows = [["", *columns]] + [
        [label, *(format(getattr(tokens, field), form) for tokens in columns.values())]
        for label, field, form in (
            ("tokens", "num_tokens", ",d"),
            ("mean |Δ logprob|", "abs_logprob_mean", ".1e"),
            ("max |Δ logprob|", "abs_logprob_max", ".1e"),
            ("ratio, mean", "ratio_mean", ".6f"),
            ("ratio, std", "ratio_std", ".1e"),
            ("ratio, min", "ratio_min", ".6f"),
            ("ratio, max", "ratio_max", ".6f"),
            (f"ratio outside {low} to {high}", "outside_frac", ".2%"),
            ("KL (k3)", "mismatch_kl", ".1e"),
            (f"clipped by {measured.objective}", "clipped_frac", ".2%"),
            ("effective sample size", "ess", ".2%"),
        )
    ]
    lines = [f"{row[0]:<26}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in rows]
    if measured.through_push is None:
        lines.append("no completion was in the engine during a push: each was done before")
    if not measured.bounds:
        bounds = (
            "bounds that are not known here"
            if is_plug_in(measured.objective)
            else "no bound on the ratio that noise could reach"
        )
        lines.append(f"{measured.objective} as configured has {bounds}")
    return "\n".join([*lines, "", *map(_margin, measured.bounds)]).rstrip()


def _margin(bound: Bound) -> str:
    if bound.noise == 0:
        return f"learner.{bound.key} = {bound.value:g}: there is no noise ({NOISE_OF[bound.level]})"
    times = f"{float(f'{bound.distance / bound.noise:.2g}'):,.0f} times the noise"
    return f"learner.{bound.key} = {bound.value:g} is {times} (mean {NOISE_OF[bound.level]}: {bound.noise:.1e})"
