"""The algorithm: the advantage, the objective, the off-policy correction, and the KL to the reference."""

import math
from typing import Literal

from learner.config.section import Section, any_of, require
from protocol.config import MayChange
from protocol.errors import ConfigError

Normalization = Literal["token", "sequence", "dr_grpo"]
KlEstimator = Literal["k1", "k2", "k3", "k3_grad_k2"]

OBJECTIVE_DEFAULTS: dict[str, dict[str, float]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 3.0},
    "cispo": {"clip_high": 4.0},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "dppo": {"tv_low": 0.2, "tv_high": 0.2, "log_ratio_penalty": 1e-3, "dual_clip": 3.0},
    "reinforce": {},
}
"""Which of the loss's bounds an objective uses, and their defaults."""

NORMALIZATIONS: dict[str, Normalization] = {"gspo": "sequence"}
"""What an objective's paper divides by; all others: token."""

BOUNDS = sorted({bound for defaults in OBJECTIVE_DEFAULTS.values() for bound in defaults})


def is_plug_in(spec: str) -> bool:
    """Return whether a value names a function of the user's, and nothing built in."""
    return ":" in spec


class LossConfig(Section):
    """The objective, its bounds and its normalisation."""

    objective: str = "grpo"
    """grpo: PPO's clip per token; gspo: per sequence; cispo: the ratio as a capped weight; sapo: a soft gate; dppo: a trust
    region in probability; reinforce: no ratio; path/to/file.py:name or module:name: your own function (learner/algorithm/README.md)."""
    normalization: Normalization | None = None
    """token: mean over all tokens of the step; sequence: mean over completions of their means; dr_grpo: a constant. Unset:
    sequence for gspo, whose loss is one number for each completion (arXiv 2507.18071, equation 5), token for all others."""
    clip_low: float | None = None
    """grpo (0.2), gspo (3e-4): a ratio below 1 - clip_low has no gradient when the advantage is negative."""
    clip_high: float | None = None
    """grpo (0.28, DAPO's clip-higher), gspo (4e-4): a ratio above 1 + clip_high has no gradient when the advantage is
    positive; cispo (4.0): the ratio counts at most 1 + clip_high."""
    dual_clip: MayChange[float | None] = None
    """grpo, gspo, dppo (3.0, or 1 + clip_high if that is more): a ratio above it has no gradient when the advantage is negative, or else
    one token whose probability has risen a thousandfold would be most of a step. inf: no bound."""
    tau_positive: float | None = None
    """sapo (1.0): how fast the gate closes when the advantage is positive."""
    tau_negative: float | None = None
    """sapo (1.05): the same when it is negative."""
    tv_low: float | None = None
    """dppo (0.2): a token whose probability fell by more has no gradient when the advantage is negative."""
    tv_high: float | None = None
    """dppo (0.2): a token whose probability rose by more has no gradient when the advantage is positive."""
    log_ratio_penalty: float | None = None
    """dppo (1e-3): weight of (log ratio)²."""
    mask_truncated: bool = False
    """Leave completions that reached max_tokens out of the loss, and of what it is divided by; they stay in the baseline (DAPO's overlong
    filtering)."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy of the tokens trained on, as a bonus."""
    top_entropy_frac: float = 1.0
    """Only this share of the step's tokens, those of the highest entropy, is trained on (arXiv 2506.01939)."""

    def lacking(self) -> dict[str, str]:
        if is_plug_in(self.objective):
            return {}
        users = {bound: [key for key, used in OBJECTIVE_DEFAULTS.items() if bound in used] for bound in BOUNDS}
        return {bound: any_of("objective", keys) for bound, keys in users.items() if self.objective not in keys}

    def check(self) -> None:
        require(
            self.objective in OBJECTIVE_DEFAULTS or is_plug_in(self.objective),
            f"objective = {self.objective!r} is not known; expected {', '.join(OBJECTIVE_DEFAULTS)}, or path/to/file.py:name",
        )
        used = OBJECTIVE_DEFAULTS.get(self.objective, {})
        for bound in BOUNDS:
            value = getattr(self, bound)
            require(value is None or value >= 0, f"{bound} = {value} must not be negative")
        if "clip_low" in used:
            low, high = self.value("clip_low"), self.value("clip_high")
            require(0 < low < 1, f"clip_low = {low} must lie between 0 and 1")
            require(high >= low, f"clip_high = {high} must not be below clip_low = {low}")
            require(
                self.dual_clip is None or self.dual_clip > 1 + high,
                f"dual_clip = {self.dual_clip} must be above 1 + clip_high = {1 + high}",
            )
        require(
            "dual_clip" not in used or self.value("dual_clip") > 1,
            f"dual_clip = {self.dual_clip} must be above 1; inf sets no bound",
        )
        for bound in ("tv_low", "tv_high"):
            require(
                bound not in used or 0 < self.value(bound) < 1,
                f"{bound} = {getattr(self, bound)} must lie between 0 and 1: no probability moves further",
            )
        require(self.clip_high is None or math.isfinite(self.clip_high), f"clip_high = {self.clip_high} must be finite")
        for tau in ("tau_positive", "tau_negative"):
            require(tau not in used or self.value(tau) > 0, f"{tau} must be above 0")
        require(self.entropy_coef >= 0, f"entropy_coef = {self.entropy_coef} must not be negative")
        require(
            0 < self.top_entropy_frac <= 1,
            f"top_entropy_frac = {self.top_entropy_frac} must lie above 0 and be at most 1 (all tokens)",
        )

    @property
    def mean_over(self) -> Normalization:
        """The normalisation as set, or the objective's default."""
        return self.normalization or NORMALIZATIONS.get(self.objective, "token")

    def value(self, bound: str) -> float:
        """Return a bound as set, or the objective's default."""
        value = getattr(self, bound)
        if value is not None:
            return float(value)
        if is_plug_in(self.objective):
            raise ConfigError(f"{self.objective} reads {bound}, which has no default for it; set learner.loss.{bound}")
        default = OBJECTIVE_DEFAULTS[self.objective][bound]
        return max(default, 1 + (self.clip_high or 0.0)) if bound == "dual_clip" else default


class CorrectionConfig(Section):
    """What is done about tokens that an older policy sampled."""

    anchor: MayChange[Literal["behaviour", "proximal"]] = "behaviour"
    """What the objective's ratio is taken to: behaviour: the policy that sampled the token; proximal: the policy at the start
    of the step (decoupled PPO, arXiv 2505.24298)."""
    proximal: MayChange[Literal["exact", "log_linear"]] = "exact"
    """Of anchor = proximal: exact: computed; log_linear: between behaviour and current policy by the token's versions,
    without a forward pass (A-3PO, arXiv 2512.06547)."""
    weight: MayChange[Literal["none", "truncate", "mask"]] = "none"
    """The importance weight, policy / behaviour: truncate: multiplies the token's loss, at most max_weight; mask: tokens whose
    weight lies outside [min_weight, max_weight] are left out (and the others weighed, unless their ratio does it)."""
    level: MayChange[Literal["token", "sequence", "geometric"]] = "token"
    """A weight for each token, for each completion (the product over its tokens), or their geometric mean."""
    max_weight: MayChange[float | None] = None
    """Upper bound of the weight (2.0; must be given for level = geometric, where 1.01 is usual)."""
    min_weight: MayChange[float | None] = None
    """mask: lower bound of the weight (none)."""
    sequence_mask: MayChange[float | None] = None
    """Leave out a completion of negative advantage whose mean log(behaviour / policy) exceeds this (DeepSeek-V3.2,
    arXiv 2512.02556)."""
    max_token_staleness: MayChange[int | None] = None
    """Tokens more versions old than this count stale_token_weight."""
    stale_token_weight: MayChange[float] = 0.0
    """0: they are left out; below 1: they count less."""

    def lacking(self) -> dict[str, str]:
        lacking = {}
        if self.anchor == "behaviour":
            lacking["proximal"] = 'anchor = "proximal"'
        if self.weight == "none":
            lacking |= dict.fromkeys(("level", "max_weight"), 'weight = "truncate" or "mask"')
        if self.weight != "mask":
            lacking["min_weight"] = 'weight = "mask"'
        if self.max_token_staleness is None:
            lacking["stale_token_weight"] = "max_token_staleness"
        return lacking

    def check(self) -> None:
        require(
            self.level != "geometric" or self.max_weight is not None,
            'level = "geometric" needs max_weight: the mean over a completion stays near 1; 1.01 is usual',
        )
        require(self.weight_bound >= 1, f"max_weight = {self.max_weight} must be at least 1")
        require(
            self.min_weight is None or 0 < self.min_weight <= 1,
            f"min_weight = {self.min_weight} must lie above 0, where every weight lies, and be at most 1",
        )
        require(
            self.sequence_mask is None or self.sequence_mask >= 0,
            f"sequence_mask = {self.sequence_mask} must not be negative",
        )
        require(
            self.max_token_staleness is None or self.max_token_staleness >= 0,
            f"max_token_staleness = {self.max_token_staleness} must not be negative",
        )
        require(
            0 <= self.stale_token_weight < 1,
            f"stale_token_weight = {self.stale_token_weight} must be at least 0 and below 1",
        )

    @property
    def weight_bound(self) -> float:
        return 2.0 if self.max_weight is None else self.max_weight


class KlConfig(Section):
    """The KL of the policy from the reference."""

    coef: float = 0.0
    """Its weight; needs a reference."""
    estimator: KlEstimator | None = None
    """With d = log reference - log policy: k1: -d; k2: d² / 2; k3: exp(d) - d - 1, whose gradient in the loss is that of the KL of the
    reference from the policy; k3_grad_k2: the value of k3, the gradient of k2, which is that of the KL of the policy. Unset: k3 in the
    loss, k1 in the reward."""
    place: Literal["loss", "reward"] = "loss"
    """loss: added to each token's loss; reward: its sum over the completion is subtracted from the reward, before the advantages."""
    schedule: Literal["constant", "linear", "target"] = "constant"
    """linear: from coef to final_coef over the run; target: coef grows and shrinks to hold the KL at `target`."""
    final_coef: float | None = None
    """linear: the weight at the last step."""
    target: float | None = None
    """target: the wanted KL per token, in nats."""
    horizon_steps: int = 10
    """target: the coefficient changes by at most 0.2 / horizon_steps of itself per step (arXiv 1909.08593)."""
    importance_weighted: bool = False
    """Multiply each token's k1 or k3 by policy / behaviour, which makes its gradient that of the KL, off-policy too
    (DeepSeek-V3.2, arXiv 2512.02556)."""

    def lacking(self) -> dict[str, str]:
        if not self._is_defined:
            return {}
        if not self.is_on:
            others = ("estimator", "place", "schedule", "final_coef", "target", "horizon_steps", "importance_weighted")
            return dict.fromkeys(others, "coef above 0")
        lacking = {}
        if self.schedule != "linear":
            lacking["final_coef"] = 'schedule = "linear"'
        elif self.final_coef == self.coef:
            lacking |= dict.fromkeys(("schedule", "final_coef"), "a final_coef other than coef")
        if self.schedule != "target":
            lacking |= dict.fromkeys(("target", "horizon_steps"), 'schedule = "target"')
        if self.place == "reward":  # which has no gradient
            lacking["importance_weighted"] = 'place = "loss"'
        return lacking

    def check(self) -> None:
        require(self.coef >= 0, f"coef = {self.coef} must not be negative")
        needed = {"constant": "coef", "linear": "final_coef", "target": "target"}[self.schedule]
        require(self._is_defined, f'schedule = "{self.schedule}" needs {needed}')
        require(self.final_coef is None or self.final_coef >= 0, f"final_coef = {self.final_coef} must not be negative")
        require(self.target is None or self.target > 0, f"target = {self.target} must be above 0")
        require(self.horizon_steps >= 1, f"horizon_steps = {self.horizon_steps} must be at least 1")
        if self.is_on and self.place == "reward":
            require(
                self.estimator in (None, "k1"),
                f'estimator = "{self.estimator}" with place = "reward" pushes the policy away from the reference where the two are '
                'close (docs: learner/algorithm/README.md#the-kl); set estimator = "k1", or place = "loss"',
            )
        if self.is_on and self.place == "loss":
            require(
                self.estimator != "k1" or self.importance_weighted,
                'estimator = "k1" in the loss: the expected gradient of log policy - log reference is zero; set '
                'importance_weighted = true, place = "reward", or another estimator',
            )
            require(
                self.estimator_used in ("k1", "k3") or not self.importance_weighted,
                f'importance_weighted = true with estimator = "{self.estimator}", whose gradient is right without it and wrong '
                'with it; set estimator to "k3" or "k1", or importance_weighted to false',
            )

    @property
    def estimator_used(self) -> KlEstimator:
        """The estimator as set, or the one that suits the place."""
        return self.estimator or ("k1" if self.place == "reward" else "k3")

    @property
    def is_on(self) -> bool:
        """Whether the coefficient is ever above 0."""
        return self.coef > 0 or (self.schedule == "linear" and bool(self.final_coef))

    @property
    def _is_defined(self) -> bool:
        """Whether the schedule has the key that it goes by."""
        goes_by = {"constant": self.coef, "linear": self.final_coef, "target": self.target}
        return goes_by[self.schedule] is not None


class AdvantageConfig(Section):
    """From the rewards of a group to how much better each completion was."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """mean: the group's mean; leave_one_out: the mean of the group's other completions (RLOO)."""
    scale: Literal["group", "batch", "none"] = "group"
    """group: divide by the group's standard deviation (Bessel) + 1e-4; batch: by that of the step; none (Dr. GRPO)."""
    combine: Literal["sum", "normalize_then_sum"] = "sum"
    """With several reward functions: sum: add the rewards; normalize_then_sum: add the advantages of each (GDPO)."""
    function: str | None = None
    """path/to/file.py:name or module:name: your own function in place of the three above (learner/algorithm/README.md)."""

    def lacking(self) -> dict[str, str]:
        return (
            {} if self.function is None else dict.fromkeys(("baseline", "scale", "combine"), "advantage.function unset")
        )

    def check(self) -> None:
        require(
            self.function is None or is_plug_in(self.function),
            f"function = {self.function!r} is not path/to/file.py:name or module:name",
        )
