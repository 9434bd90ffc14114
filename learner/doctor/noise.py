"""Noise floor: how far server and learner differ on the same tokens and weights, and the effect on a run.

    self_test.py: logprobs of both sides ─▶ ComparedTokens ─▶ floor, bounds ─▶ NoiseMeasurement ─▶ table, problems

Pure. Invariant: every problem states the measurement, the expectation and the remedy. Causes precede effects.

Suffixes: N = tokens of all completions, grouped by completion; C = completions.
"""

from typing import Literal

import msgspec
import numpy as np
import torch

from learner.algorithm.correction import binary_kl
from learner.config import LearnerConfig
from learner.config.objectives import is_plug_in

TRUSTED_RATIO = (0.9, 1.1)
Level = Literal["token", "sequence", "geometric", "probability", "binary_kl"]
SMALLEST_MARGIN = 10.0
"""Ratio of a bound's distance to the noise below which the bound acts on noise."""
NOISE_OF = {
    "token": "|ratio - 1| of a token",
    "sequence": "|ratio - 1| of a completion",
    "geometric": "|ratio - 1| of a completion's geometric mean",
    "probability": "difference of a token's probabilities",
    "binary_kl": "KL of the event that a token is sampled",
}


class ComparedTokens(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Tokens of completions with a finite logprob from both sides."""

    logprobs_N: np.ndarray
    """Logprobs of the learner, float64."""
    behavior_logprobs_N: np.ndarray
    """Logprobs of the server, float64, finite."""
    is_held_N: np.ndarray
    """Whether the bound of the objective holds back the token's gradient."""
    is_fresh_N: np.ndarray
    """Whether no weight sync happened while the completion was in the engine."""
    completion_N: np.ndarray
    """Index of the token's completion, from 0."""
    num_not_finite: int
    """Number of tokens left out because a side's logprob is NaN or inf."""


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """Noise of a set of tokens.

    The ratio is exp(learner's logprob - server's logprob), and 1 without noise.
    """

    num_tokens: int
    abs_logprob_mean: float
    abs_logprob_max: float
    ratio_mean: float
    ratio_std: float
    ratio_min: float
    ratio_max: float
    outside_frac: float
    """Share of the tokens whose ratio is outside TRUSTED_RATIO."""
    mismatch_kl: float
    """Mean of ratio - 1 - log ratio (k3)."""
    clipped_frac: float
    """Share of the tokens whose gradient the bound of the run's objective holds back."""
    ess: float
    """Effective sample size as a share: (Σ ratio)² / (N Σ ratio²)."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """A bound of the loss, and the noise at its level."""

    key: str
    value: float
    distance: float
    """Distance of the bound from ratio 1, or from a probability difference or a KL of 0."""
    level: Level
    noise: float
    """Mean distance that noise alone causes, at the bound's level."""


def floor(tokens: ComparedTokens, chosen_N: np.ndarray) -> Floor | None:
    """Return the noise of the chosen tokens, or None if there are none."""
    if not chosen_N.any():
        return None
    log_ratio_N = (tokens.logprobs_N - tokens.behavior_logprobs_N)[chosen_N]
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
    """Return the bounds of the objective and the correction that noise can reach."""
    loss, correction = config.loss, config.off_policy_correction
    found: list[tuple[str, float, float, Level]] = []
    # The ratio to the exact proximal policy uses only the learner's logprobs, so it has no noise.
    if correction.anchor_used == "behavior" or correction.proximal == "log_linear":
        if loss.objective in ("grpo", "gspo", "gmpo", "clip_cov"):
            level: Level = "geometric" if loss.objective == "gspo" else "token"
            found += [(f"loss.{key}", value := loss.value(key), value, level) for key in ("clip_low", "clip_high")]
        elif loss.objective == "cispo":
            found.append(("loss.clip_high", value := loss.value("clip_high"), value, "token"))
        elif loss.objective in ("dppo", "ipo"):
            found += [(f"loss.{key}", value := loss.value(key), value, "probability") for key in ("tv_low", "tv_high")]
    # Noise changes a truncated weight by no more than the noise itself. A masked weight drops its token.
    if correction.weight_used == "mask":
        found.append(
            (
                "off_policy_correction.max_weight",
                correction.weight_bound,
                correction.weight_bound - 1,
                correction.granularity,
            )
        )
        if correction.min_weight is not None:
            distance = 1 - correction.min_weight
            found.append(("off_policy_correction.min_weight", correction.min_weight, distance, correction.granularity))
    if (max_kl := correction.max_binary_kl) is not None:
        found.append(("off_policy_correction.max_binary_kl", max_kl, max_kl, "binary_kl"))
    if correction.sequence_mask is not None:
        found.append(
            ("off_policy_correction.sequence_mask", correction.sequence_mask, correction.sequence_mask, "geometric")
        )
    return [
        Bound(key=key, value=value, distance=distance, level=level, noise=noise(tokens, level))
        for key, value, distance, level in found
    ]


def noise(tokens: ComparedTokens, level: Level) -> float:
    """Return the mean |r - 1|, the mean |p - p_server| at the level "probability", or the mean KL at "binary_kl".

    r is the ratio of a token, of a completion (the product), or a completion's geometric mean.
    """
    log_ratio_N = tokens.logprobs_N - tokens.behavior_logprobs_N
    if level == "binary_kl":
        return float(binary_kl(*map(torch.from_numpy, (tokens.logprobs_N, tokens.behavior_logprobs_N))).mean())
    if level == "token":
        return float(np.abs(np.expm1(log_ratio_N)).mean())
    if level == "probability":
        return float(np.abs(np.exp(tokens.logprobs_N) - np.exp(tokens.behavior_logprobs_N)).mean())
    _, completion_N, length_C = np.unique(tokens.completion_N, return_inverse=True, return_counts=True)
    log_ratio_C = np.bincount(completion_N, weights=log_ratio_N)
    return float(np.abs(np.expm1(log_ratio_C if level == "sequence" else log_ratio_C / length_C)).mean())


class NoiseMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the self-test, and the settings of the run to compare them with."""

    dtype: str
    objective: str
    temperature: float
    parity_bound: float
    num_not_finite: int
    fresh: Floor | None
    through_push: Floor | None
    """Noise of completions in the engine during a weight sync, or None without any."""
    bounds: list[Bound]
    is_quantized: bool = False
    """Whether a server quantizes, so that both sides differ by more than noise."""
    has_rewards: bool = True
    """Whether advantages derive from rewards. Without them all are 0 here, and most bounds need their sign."""
    at_temperature_1: Floor | None = None
    """Noise of all tokens at temperature 1, if they do not fit the run's temperature."""

    @property
    def columns(self) -> dict[str, Floor]:
        columns = {"fresh": self.fresh, "across a sync": self.through_push}
        return {name: tokens for name, tokens in columns.items() if tokens is not None}

    @property
    def disagreeing(self) -> dict[str, Floor]:
        """Columns whose mean |Δ logprob| is NaN or above the bound of the parity check."""
        return {name: tokens for name, tokens in self.columns.items() if not self.is_close(tokens)}

    def is_close(self, tokens: Floor) -> bool:
        return tokens.abs_logprob_mean <= self.parity_bound


def problems(measured: NoiseMeasurement) -> list[str]:
    """Return the problems.

    The list is empty if both sides agree and nothing in the run acts on the remaining noise. What quantization changes
    is expected to reach the bounds (docs/quantization.md), so they are only in the table.
    """
    found = _disagreements(measured)
    if measured.num_not_finite:
        found.append(
            f"{measured.num_not_finite} tokens have a NaN or inf logprob on one of the two sides, and the loss would "
            'exclude them; check the weights for NaN and inf, or set dtype = "float32"'
        )
    if measured.is_quantized:
        return found
    for name, tokens in measured.columns.items():
        if tokens.clipped_frac > 0:
            found.append(
                f"{tokens.clipped_frac:.2%} of the tokens ({name}) are clipped by {measured.objective} although the "
                'weights are the same; widen the bounds in learner.loss, or set dtype = "float32" on both sides'
            )
    for bound in measured.bounds:
        if bound.distance < SMALLEST_MARGIN * bound.noise:
            found.append(
                f"learner.{bound.key} = {bound.value:g} is only {bound.distance / bound.noise:.1f} times the noise "
                f"(mean {NOISE_OF[bound.level]}: {bound.noise:.1e}), so it acts on noise; widen it to "
                f'{SMALLEST_MARGIN:.0f} times the noise, or set dtype = "float32" on both sides'
            )
    return found


def _disagreements(measured: NoiseMeasurement) -> list[str]:
    disagreeing = measured.disagreeing
    if not disagreeing:
        return []
    untempered = measured.at_temperature_1
    if untempered is not None and measured.is_close(untempered):
        worst = max(tokens.abs_logprob_mean for tokens in disagreeing.values())
        return [
            f"the server's logprobs are those of temperature 1 (mean |Δ logprob| {untempered.abs_logprob_mean:.1e}, "
            f"but {worst:.2g} at temperature {measured.temperature:g}): it does not apply "
            f"learner.sampling.temperature = {measured.temperature:g}; install the same slipstream-rl on both sides, "
            "or set it to 1"
        ]
    values = ", ".join(f"{tokens.abs_logprob_mean:.2g} ({name})" for name, tokens in disagreeing.items())
    problem = (
        f"server and learner disagree: the mean |Δ logprob| of sampled tokens is {values}, the bound is "
        f"{measured.parity_bound:.2g} for {measured.dtype} (learner.parity.max_mean_abs_logprob)"
    )
    if "fresh" in measured.columns.keys() - disagreeing.keys():
        advice = (
            "only a sync of equal weights lies between, so the engine kept stale state: change "
            "server.kv_cache_on_weight_sync"
        )
    else:
        advice = (
            "the fixed sequences agreed at the start, so the cause is in sampling: check temperature, top_p, top_k "
            "and how the server processes logits before sampling"
        )
    return [f"{problem}; {advice}"]


def format_measurement(measured: NoiseMeasurement) -> str:
    """Format the table, and the margin of each bound over the noise."""
    columns = measured.columns
    low, high = TRUSTED_RATIO
    clipped = [(f"clipped by {measured.objective}", "clipped_frac", ".2%")] if measured.has_rewards else []
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
            *clipped,
            ("effective sample size", "ess", ".2%"),
        )
    ]
    lines = [f"{row[0]:<26}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in rows]
    if measured.is_quantized:
        lines.append(
            "a server quantizes: most of the difference is expected, and learner.off_policy_correction applies to it"
        )
    if measured.through_push is None:
        lines.append("no completion was in the engine during a weight sync: each was finished before")
    if not measured.bounds:
        bounds = (
            "bounds that the self-test does not know"
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
