"""Config of the algorithm: advantage, objective, off-policy correction, and KL to the reference."""

import math
from typing import Literal, Self

import msgspec

from learner.config.section import AtLeastOne, Fraction, NotNegative, Positive, Section, Share, any_of, require
from protocol.config_keys import MayChange
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
"""Bounds that each objective uses, with their defaults."""

NORMALIZATIONS: dict[str, Normalization] = {"gspo": "sequence"}
"""Normalizations that differ from the default, token, by the paper of the objective."""

BOUNDS = sorted({bound for defaults in OBJECTIVE_DEFAULTS.values() for bound in defaults})


def is_plug_in(spec: str) -> bool:
    """Return whether a value names a user function rather than a built-in."""
    return ":" in spec


class LossConfig(Section):
    """Policy objective, with its bounds and its normalization."""

    objective: str = "grpo"
    """Policy objective. grpo: PPO's clip per token; gspo: PPO's clip per sequence; cispo: the ratio as a
    capped weight; sapo: a soft gate; dppo: a trust region in probability; reinforce: no ratio;
    path/to/file.py:name or module:name: your own function (docs/custom-losses.md)."""
    normalization: Normalization | None = None
    """Normalization of the loss. token: mean over all tokens of the step; sequence: mean over completions of
    their means; dr_grpo: division by a constant. Unset: sequence for gspo, whose loss is one number per
    completion (arXiv 2507.18071, equation 5), token for all other objectives."""
    clip_low: NotNegative[float] | None = None
    """Lower clip bound: a ratio below 1 - clip_low has no gradient when the advantage is negative. Default:
    0.2 for grpo, 3e-4 for gspo."""
    clip_high: NotNegative[float] | None = None
    """Upper clip bound. grpo and gspo: a ratio above 1 + clip_high has no gradient when the advantage is
    positive; cispo: the ratio counts at most 1 + clip_high. Default: 0.28 for grpo (DAPO's clip-higher), 4e-4
    for gspo, 4.0 for cispo."""
    dual_clip: MayChange[NotNegative[float] | None] = None
    """Upper bound on the ratio when the advantage is negative, for grpo, gspo and dppo: a ratio above it has
    no gradient. Without it, one token whose probability rose a thousandfold would dominate a step. Default:
    3.0, or 1 + clip_high if that is larger. inf: no bound."""
    tau_positive: NotNegative[float] | None = None
    """Steepness of sapo's gate when the advantage is positive. Default: 1.0."""
    tau_negative: NotNegative[float] | None = None
    """Steepness of sapo's gate when the advantage is negative. Default: 1.05."""
    tv_low: NotNegative[float] | None = None
    """Bound of dppo: a token whose probability fell by more has no gradient when the advantage is negative.
    Default: 0.2."""
    tv_high: NotNegative[float] | None = None
    """Bound of dppo: a token whose probability rose by more has no gradient when the advantage is positive.
    Default: 0.2."""
    log_ratio_penalty: NotNegative[float] | None = None
    """Weight of (log ratio)² in dppo. Default: 1e-3."""
    mask_truncated: bool = False
    """Whether to exclude completions that reached max_tokens from the loss and from its normalization. They
    stay in the baseline (DAPO's overlong filtering)."""
    entropy_coef: NotNegative[float] = 0.0
    """Weight of the entropy bonus, the mean entropy of the trained tokens."""
    top_entropy_frac: Share[float] = 1.0
    """Share of the step's tokens to train on, those with the highest entropy (arXiv 2506.01939)."""

    def unmet_needs(self) -> dict[str, str]:
        if is_plug_in(self.objective):
            return {}
        users = {bound: [key for key, used in OBJECTIVE_DEFAULTS.items() if bound in used] for bound in BOUNDS}
        return {bound: any_of("objective", keys) for bound, keys in users.items() if self.objective not in keys}

    def check(self) -> None:
        require(
            self.objective in OBJECTIVE_DEFAULTS or is_plug_in(self.objective),
            f"objective = {self.objective!r} is not a known objective; use {', '.join(OBJECTIVE_DEFAULTS)}, or "
            "path/to/file.py:name",
        )
        used = OBJECTIVE_DEFAULTS.get(self.objective, {})
        if "clip_low" in used:
            low, high = self.value("clip_low"), self.value("clip_high")
            require(0 < low < 1, f"clip_low = {low} must be between 0 and 1")
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
                f"{bound} = {getattr(self, bound)} must be between 0 and 1, because no probability changes by more",
            )
        require(self.clip_high is None or math.isfinite(self.clip_high), f"clip_high = {self.clip_high} must be finite")
        for tau in ("tau_positive", "tau_negative"):
            require(tau not in used or self.value(tau) > 0, f"{tau} = {getattr(self, tau)} must be above 0")

    @property
    def mean_over(self) -> Normalization:
        """Normalization as set, or the objective's default."""
        return self.normalization or NORMALIZATIONS.get(self.objective, "token")

    def value(self, bound: str) -> float:
        """Return a bound as set, or the objective's default.

        Raises:
            ConfigError: A user function reads a bound that is not set.
        """
        value = getattr(self, bound)
        if value is not None:
            return float(value)
        if is_plug_in(self.objective):
            raise ConfigError(
                f"learner.loss.objective = {self.objective!r} reads {bound}, which has no default for a user function; "
                f"set learner.loss.{bound}"
            )
        default = OBJECTIVE_DEFAULTS[self.objective][bound]
        return max(default, 1 + (self.clip_high or 0.0)) if bound == "dual_clip" else default


class OffPolicyCorrectionConfig(Section):
    """Off-policy correction of tokens that an older or a quantized policy sampled."""

    anchor: MayChange[Literal["auto", "behaviour", "proximal"]] = "auto"
    """Denominator of the objective's ratio. behaviour: the policy that sampled the token; proximal: the
    policy at the start of the step (decoupled PPO, arXiv 2505.24298). auto: behaviour; proximal if weight =
    auto truncates."""
    proximal: MayChange[Literal["exact", "log_linear"]] = "exact"
    """Source of the proximal logprobs, with anchor = proximal. exact: a forward pass; log_linear:
    interpolation between behavior and current policy by the token's staleness, without a forward pass (A-3PO,
    arXiv 2512.06547)."""
    weight: MayChange[Literal["auto", "none", "truncate", "mask"]] = "auto"
    """Use of the importance weight, policy / behavior. none: not used; truncate: multiplies the token's loss,
    at most max_weight; mask: excludes tokens with a weight outside [min_weight, max_weight]. With mask, the
    weight multiplies the loss of the kept tokens, unless the objective's ratio already does. auto: none;
    truncate if a server quantizes (docs/quantization.md)."""
    granularity: MayChange[Literal["token", "sequence", "geometric"]] = "token"
    """Granularity of the importance weight. token: one per token; sequence: one per completion, the product
    over its tokens; geometric: one per completion, the geometric mean over its tokens."""
    max_weight: MayChange[AtLeastOne[float] | None] = None
    """Upper bound of the importance weight. Default: 2.0; required for granularity = geometric, where 1.01 is
    usual."""
    min_weight: MayChange[Share[float] | None] = None
    """Lower bound of the importance weight, with weight = mask. Unset: no lower bound."""
    sequence_mask: MayChange[NotNegative[float] | None] = None
    """Maximum mean log(behavior / policy) of a completion with a negative advantage. Completions above it are
    excluded (DeepSeek-V3.2, arXiv 2512.02556)."""
    max_token_staleness: MayChange[NotNegative[int] | None] = None
    """Maximum staleness of a token, in policy versions. Staler tokens count stale_token_weight."""
    stale_token_weight: MayChange[Fraction[float]] = 0.0
    """Weight of tokens above max_token_staleness. 0: they are excluded; below 1: they count less."""

    def unmet_needs(self) -> dict[str, str]:
        unmet_needs = {}
        if self.anchor_used == "behaviour":
            unmet_needs["proximal"] = 'anchor = "proximal"'
        if self.weight_used == "none":
            unmet_needs |= dict.fromkeys(("granularity", "max_weight"), 'weight = "truncate" or "mask"')
        if self.weight != "mask":
            unmet_needs["min_weight"] = 'weight = "mask"'
        if self.max_token_staleness is None:
            unmet_needs["stale_token_weight"] = "max_token_staleness"
        return unmet_needs

    def check(self) -> None:
        require(
            self.granularity != "geometric" or self.max_weight is not None,
            'granularity = "geometric" needs max_weight, because the mean over a completion stays near 1; set it, '
            "usually to 1.01",
        )

    @property
    def anchor_used(self) -> Literal["behaviour", "proximal"]:
        """Anchor as set, or the default for servers that do not quantize."""
        return "behaviour" if self.anchor == "auto" else self.anchor

    @property
    def weight_used(self) -> Literal["none", "truncate", "mask"]:
        """Weight as set, or the default for servers that do not quantize."""
        return "none" if self.weight == "auto" else self.weight

    def for_quantized_servers(self, objective: str, staleness_bound: int) -> Self:
        """Return the correction with its automatic parts chosen for servers that quantize.

        The weight corrects the difference that quantization makes, and must not count twice: with the behavior
        policy as its anchor, the ratio of an objective already is the weight. An exact proximal policy would leave
        stale tokens without a clip.
        """
        if self.weight != "auto":
            return self
        if objective == "reinforce":  # has no ratio
            return msgspec.structs.replace(self, weight="truncate")
        if self.anchor == "behaviour":
            return msgspec.structs.replace(self, weight="none")
        proximal = self.proximal if self.anchor == "proximal" else "log_linear" if staleness_bound else "exact"
        return msgspec.structs.replace(self, weight="truncate", anchor="proximal", proximal=proximal)

    @property
    def weight_bound(self) -> float:
        return 2.0 if self.max_weight is None else self.max_weight


class KlConfig(Section):
    """KL of the policy to the reference."""

    coef: NotNegative[float] = 0.0
    """KL coefficient. A coefficient above 0 needs a reference."""
    estimator: KlEstimator | None = None
    """KL estimator, with d = log reference - log policy. k1: -d; k2: d² / 2; k3: exp(d) - d - 1; k3_grad_k2:
    the value of k3 with the gradient of k2. In the loss, k3 has the gradient of KL(reference ‖ policy), and
    k2 that of KL(policy ‖ reference). Unset: k3 in the loss, k1 in the reward."""
    place: Literal["loss", "reward"] = "loss"
    """Where the KL applies. loss: added to each token's loss; reward: summed over the completion and
    subtracted from its reward, before the advantages."""
    schedule: Literal["constant", "linear", "target"] = "constant"
    """Schedule of the coefficient. constant: coef; linear: from coef to final_coef over the run; target:
    adapted to hold the KL at `target`."""
    final_coef: NotNegative[float] | None = None
    """KL coefficient at the last step, with schedule = linear."""
    target: Positive[float] | None = None
    """Target KL per token, in nats, with schedule = target."""
    horizon_steps: AtLeastOne[int] = 10
    """Horizon of the adaptation, with schedule = target: a step changes the coefficient by at most 0.2 /
    horizon_steps of itself (arXiv 1909.08593)."""
    importance_weighted: bool = False
    """Whether to multiply each token's k1 or k3 by policy / behavior. The gradient is then that of the KL,
    also off-policy (DeepSeek-V3.2, arXiv 2512.02556)."""

    def unmet_needs(self) -> dict[str, str]:
        if not self._is_defined:
            return {}
        if not self.is_on:
            others = ("estimator", "place", "schedule", "final_coef", "target", "horizon_steps", "importance_weighted")
            return dict.fromkeys(others, "coef above 0")
        unmet_needs = {}
        if self.schedule != "linear":
            unmet_needs["final_coef"] = 'schedule = "linear"'
        elif self.final_coef == self.coef:
            unmet_needs |= dict.fromkeys(("schedule", "final_coef"), "a final_coef other than coef")
        if self.schedule != "target":
            unmet_needs |= dict.fromkeys(("target", "horizon_steps"), 'schedule = "target"')
        if self.place == "reward":  # the reward has no gradient
            unmet_needs["importance_weighted"] = 'place = "loss"'
        return unmet_needs

    def check(self) -> None:
        needed = {"constant": "coef", "linear": "final_coef", "target": "target"}[self.schedule]
        require(self._is_defined, f'schedule = "{self.schedule}" needs {needed}')
        if self.is_on and self.place == "reward":
            require(
                self.estimator in (None, "k1"),
                f'estimator = "{self.estimator}" with place = "reward" moves the policy away from the reference where '
                'the two are close (see docs/kl-and-reference.md#estimators); set estimator = "k1", or place = "loss"',
            )
        if self.is_on and self.place == "loss":
            require(
                self.estimator != "k1" or self.importance_weighted,
                'estimator = "k1" with place = "loss": the expected gradient of log policy - log reference is zero; '
                'set importance_weighted = true, place = "reward", or another estimator',
            )
            require(
                self.estimator_used in ("k1", "k3") or not self.importance_weighted,
                f'importance_weighted = true with estimator = "{self.estimator}": the gradient of this estimator is '
                'correct only without importance weights; set estimator to "k3" or "k1", or importance_weighted to '
                "false",
            )

    @property
    def estimator_used(self) -> KlEstimator:
        """Estimator as set, or the default for the place."""
        return self.estimator or ("k1" if self.place == "reward" else "k3")

    @property
    def is_on(self) -> bool:
        """True if the coefficient is ever above 0."""
        return self.coef > 0 or (self.schedule == "linear" and bool(self.final_coef))

    @property
    def _is_defined(self) -> bool:
        """True if the key that the schedule requires is set."""
        required = {"constant": self.coef, "linear": self.final_coef, "target": self.target}
        return required[self.schedule] is not None


class AdvantageConfig(Section):
    """Conversion of a group's rewards to advantages."""

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """Baseline of the rewards. mean: the group's mean; leave_one_out: the mean of the group's other
    completions (RLOO)."""
    scale: Literal["group", "batch", "none"] = "group"
    """Divisor of the advantages. group: the group's standard deviation (Bessel) + 1e-4; batch: that of the
    step; none: no division (Dr. GRPO)."""
    combine: Literal["sum", "normalize_then_sum"] = "sum"
    """Combination of several reward functions. sum: add the rewards; normalize_then_sum: add the advantages
    of each function (GDPO)."""
    function: str | None = None
    """Your own function in place of baseline, scale and combine: path/to/file.py:name or module:name
    (docs/custom-losses.md)."""

    def unmet_needs(self) -> dict[str, str]:
        return (
            {} if self.function is None else dict.fromkeys(("baseline", "scale", "combine"), "advantage.function unset")
        )

    def check(self) -> None:
        require(
            self.function is None or is_plug_in(self.function),
            f"function = {self.function!r} is not path/to/file.py:name or module:name",
        )
