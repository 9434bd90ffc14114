"""Config of the policy objective: its bounds, its normalization, and the entropy bonus."""

import math
from typing import Annotated

import msgspec
import tyro

from learner.config.objectives import BOUNDS, OBJECTIVES, Normalization, is_plug_in
from learner.config.section import (
    NotNegative,
    Positive,
    Section,
    Share,
    any_of,
    require,
)
from protocol.config_keys import PASSED_ON, MayChange
from protocol.errors import ConfigError


class LossConfig(Section):
    """Policy objective, with its bounds and its normalization."""

    objective: str = "grpo"
    """Policy objective. grpo: PPO's clip per token; gspo: PPO's clip per sequence; gmpo: the geometric mean of
    clipped ratios; cispo: the ratio as a capped weight; sapo: a soft gate; vespo: a soft weight per sequence;
    dppo, ipo: a trust region in probability; clip_cov, kl_cov: restraint of the tokens that lower the entropy;
    reinforce: no ratio; path/to/file.py:name or module:name: your own function (docs/custom-losses.md)."""
    normalization: Normalization | None = None
    """Normalization of the loss. token: mean over all tokens of the step; sequence: mean over completions of
    their means; sequence_sum: mean over completions of their sums (LUSPO, arXiv 2602.05261); dr_grpo: division
    by a constant. Unset: sequence for gspo (arXiv 2507.18071, equation 5) and gmpo, whose loss is one number per
    completion, token for all other objectives."""
    clip_low: NotNegative[float] | None = None
    """Lower clip bound: a ratio below 1 - clip_low has no gradient when the advantage is negative; for gmpo, a
    log-ratio below -clip_low. Default: 0.2 for grpo and clip_cov, 3e-4 for gspo, 0.4 for gmpo."""
    clip_high: NotNegative[float] | None = None
    """Upper clip bound. grpo, gspo and clip_cov: a ratio above 1 + clip_high has no gradient when the advantage
    is positive; gmpo: a log-ratio above clip_high; cispo: the ratio counts at most 1 + clip_high. Default: 0.28
    for grpo (DAPO's clip-higher), 4e-4 for gspo, 0.4 for gmpo, 4.0 for cispo, 0.2 for clip_cov."""
    dual_clip: MayChange[NotNegative[float] | None] = None
    """Upper bound on the ratio when the advantage is negative, for all objectives that have no bound of their
    own there: a ratio above it has no gradient. Without it, one token whose probability rose a thousandfold would
    dominate a step. Default: 3.0, or 1 + clip_high if that is larger. inf: no bound."""
    tau_positive: NotNegative[float] | None = None
    """Steepness of sapo's gate when the advantage is positive. Default: 1.0."""
    tau_negative: NotNegative[float] | None = None
    """Steepness of sapo's gate when the advantage is negative. Default: 1.05."""
    tv_low: NotNegative[float] | None = None
    """Bound of dppo and ipo: a token whose probability fell by more has no gradient; with dppo, only when the
    advantage is negative. Default: 0.2 for dppo, 0.3 for ipo."""
    tv_high: NotNegative[float] | None = None
    """Bound of dppo and ipo: a token whose probability rose by more has no gradient; with dppo, only when the
    advantage is positive. Default: 0.2 for dppo, 0.3 for ipo."""
    log_ratio_penalty: NotNegative[float] | None = None
    """Weight of (log ratio)² in dppo and ipo. Default: 1e-3 for dppo, 0 for ipo."""
    power_positive: NotNegative[float] | None = None
    """Power of the ratio in vespo's weight when the advantage is positive: how strongly a completion that became
    unlikely is weighted down. Default: 2.0."""
    decay_positive: NotNegative[float] | None = None
    """Decay of vespo's weight when the advantage is positive: how strongly a completion that became likely is
    weighted down. Default: 3.0."""
    power_negative: NotNegative[float] | None = None
    """Power of the ratio in vespo's weight when the advantage is negative. Default: 3.0."""
    decay_negative: NotNegative[float] | None = None
    """Decay of vespo's weight when the advantage is negative. Default: 2.0."""
    cov_frac: Share[float] | None = None
    """Share of the step's tokens that clip_cov leaves out, or that kl_cov penalizes. Default: 2e-4."""
    cov_low: float | None = None
    """Lower bound on the covariance of the tokens that clip_cov leaves out. Default: 1.0."""
    cov_high: float | None = None
    """Upper bound on the covariance of the tokens that clip_cov leaves out. Default: 5.0."""
    cov_penalty: NotNegative[float] | None = None
    """Weight of |log ratio| for the tokens that kl_cov penalizes. Default: 1.0."""
    parameters: Annotated[dict[str, float], PASSED_ON, tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """Parameters that your own objective declares (docs/custom-losses.md), as in `parameters = {width = 0.2}`."""
    mask_truncated: bool = False
    """Whether to exclude completions that reached max_tokens, and whole episodes that end so, from the loss and
    from its normalization. They stay in the baseline (DAPO's overlong filtering)."""
    entropy_coef: NotNegative[float] = 0.0
    """Weight of the entropy bonus, the mean entropy of the trained tokens. With entropy_target, the
    value from which it is adapted."""
    entropy_target: Positive[float] | None = None
    """Mean entropy per token to hold, in nats. The entropy bonus then applies only in steps after one with an
    entropy of at most this target, and its weight rises or falls by entropy_coef_step per step (Skywork-OR1,
    arXiv 2505.22312). Unset: the weight is constant."""
    entropy_coef_step: Positive[float] = 0.005
    """Change of the entropy bonus's weight per step, with entropy_target."""
    max_entropy_coef: NotNegative[float] = 1.0
    """Highest weight of the entropy bonus, with entropy_target."""
    top_entropy_frac: Share[float] = 1.0
    """Share of the step's tokens to train on, those with the highest entropy (arXiv 2506.01939)."""

    def unmet_needs(self) -> dict[str, str]:
        unmet_needs: dict[str, str] = {}
        if self.entropy_target is None:
            unmet_needs |= dict.fromkeys(("entropy_coef_step", "max_entropy_coef"), "entropy_target")
        if is_plug_in(self.objective):
            return unmet_needs
        users = {bound: [key for key, row in OBJECTIVES.items() if bound in row.bounds] for bound in BOUNDS}
        unmet_needs |= {bound: any_of("objective", keys) for bound, keys in users.items() if self.objective not in keys}
        return unmet_needs | {"parameters": "a function of your own as objective"}

    def check(self) -> None:
        require(
            self.objective in OBJECTIVES or is_plug_in(self.objective),
            f"objective = {self.objective!r} is not a known objective; use {', '.join(OBJECTIVES)}, or "
            "path/to/file.py:name",
        )
        used = OBJECTIVES[self.objective].bounds if self.objective in OBJECTIVES else {}
        if "clip_low" in used:
            low, high = self.value("clip_low"), self.value("clip_high")
            require(0 < low < 1, f"clip_low = {low} must be between 0 and 1")
            require(high >= low, f"clip_high = {high} must not be below clip_low = {low}")
            require(
                self.dual_clip is None or self.dual_clip >= 1 + high,
                f"dual_clip = {self.dual_clip} must not be below 1 + clip_high = {1 + high}",
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
        for bound in ("clip_high", "power_positive", "power_negative", "decay_positive", "decay_negative"):
            value = getattr(self, bound)
            require(value is None or math.isfinite(value), f"{bound} = {value} must be finite")
        for tau in ("tau_positive", "tau_negative"):
            require(tau not in used or self.value(tau) > 0, f"{tau} = {getattr(self, tau)} must be above 0")
        require(
            "cov_low" not in used or self.value("cov_low") < self.value("cov_high"),
            f"cov_low = {self.cov_low} must be below cov_high; otherwise no token is between the two",
        )
        require(
            self.entropy_target is None or self.entropy_coef <= self.max_entropy_coef,
            f"entropy_coef = {self.entropy_coef} must not be above max_entropy_coef = {self.max_entropy_coef}",
        )
        is_own = sorted(set(self.parameters) & set(BOUNDS))
        require(
            not is_own,
            f"parameters contains {', '.join(is_own)}, which are keys of learner.loss; set them there",
        )

    @property
    def mean_over(self) -> Normalization:
        """Normalization as set, or the objective's default."""
        return self.normalization or (OBJECTIVES[self.objective].normalization if self._is_built_in else "token")

    @property
    def has_ratio(self) -> bool | None:
        """Whether the ratio multiplies the objective's gradient; None: a function of the user says so."""
        return OBJECTIVES[self.objective].has_ratio if self._is_built_in else None

    @property
    def is_of_completion(self) -> bool:
        """Whether one ratio covers the whole completion."""
        return self._is_built_in and OBJECTIVES[self.objective].is_of_completion

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss has an entropy term in any step."""
        return self.entropy_coef > 0 or self.entropy_target is not None

    @property
    def _is_built_in(self) -> bool:
        return self.objective in OBJECTIVES

    def value(self, bound: str) -> float:
        """Return a bound as set, or the objective's default; for a user function, also one of its parameters.

        Raises:
            ConfigError: A user function reads a bound that is not set, or a parameter that it does not declare.
        """
        value = self.parameters.get(bound, getattr(self, bound, None) if bound in BOUNDS else None)
        if value is not None:
            return float(value)
        if not self._is_built_in:
            raise ConfigError(
                f"learner.loss.objective = {self.objective!r} reads {bound}, which has no default for a user function; "
                + (f"set learner.loss.{bound}" if bound in BOUNDS else "declare it in the function's `parameters`")
            )
        default = OBJECTIVES[self.objective].bounds[bound]
        return max(default, 1 + (self.clip_high or 0.0)) if bound == "dual_clip" else default
