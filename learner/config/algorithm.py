"""Config of the algorithm around the objective: advantage, off-policy correction, and KL to the reference."""

from typing import Literal, Self

import msgspec

from learner.config.loss import LossConfig
from learner.config.objectives import is_plug_in
from learner.config.section import (
    AtLeastOne,
    Fraction,
    NotNegative,
    NotNegativeFinite,
    Positive,
    Section,
    Share,
    any_of,
    require,
)
from protocol.config_keys import MayChange

KlEstimator = Literal["k1", "k2", "k3", "k3_grad_k2"]


class OffPolicyCorrectionConfig(Section):
    """Off-policy correction of tokens that an older or a quantized policy sampled."""

    anchor: MayChange[Literal["auto", "behavior", "proximal"]] = "auto"
    """Denominator of the objective's ratio. behavior: the policy that sampled the token; proximal: the
    policy at the start of the step (decoupled PPO, arXiv 2505.24298). auto: behavior; proximal if weight =
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
    """Lower bound of the importance weight. truncate: a lower weight counts as this bound; mask: the token is
    excluded. Unset: no lower bound."""
    weighted_completions: MayChange[Literal["all", "negative"]] = "all"
    """Completions to which the importance weight applies. all: every completion; negative: those with a negative
    advantage, while all others have the weight 1 (TOPR, arXiv 2503.14286)."""
    max_binary_kl: MayChange[Positive[float] | None] = None
    """Maximum KL between policy and behavior of the event that the token is sampled, in nats. A token above it in
    either direction is excluded (KPop, ringtech.notion.site/kpop, with 0.1). Unset: no bound."""
    sequence_mask: MayChange[NotNegative[float] | None] = None
    """Maximum mean log(behavior / policy) of a completion with a negative advantage. Completions above it are
    excluded (DeepSeek-V3.2, arXiv 2512.02556)."""
    max_token_staleness: MayChange[NotNegative[int] | None] = None
    """Maximum staleness of a token, in policy versions. Staler tokens count stale_token_weight."""
    stale_token_weight: MayChange[Fraction[float]] = 0.0
    """Weight of tokens above max_token_staleness. 0: they are excluded; below 1: they count less."""

    def unmet_needs(self) -> dict[str, str]:
        unmet_needs = {}
        if self.anchor_used == "behavior":
            unmet_needs["proximal"] = 'anchor = "proximal"'
        if self.weight == "none":  # "auto" may truncate
            others = ("granularity", "max_weight", "min_weight", "weighted_completions")
            unmet_needs |= dict.fromkeys(others, 'weight = "truncate" or "mask"')
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
    def anchor_used(self) -> Literal["behavior", "proximal"]:
        """Anchor as set, or the default for servers that do not quantize."""
        return "behavior" if self.anchor == "auto" else self.anchor

    @property
    def weight_used(self) -> Literal["none", "truncate", "mask"]:
        """Weight as set, or the default for servers that do not quantize."""
        return "none" if self.weight == "auto" else self.weight

    def for_quantized_servers(self, loss: LossConfig, staleness_bound: int, *, has_ratio: bool) -> Self:
        """Return the correction with its automatic parts chosen for servers that quantize.

        `has_ratio`: whether the ratio multiplies the objective's gradient, which may be a function of the user.

        The weight corrects the difference that quantization makes, and must not count twice: with the behavior
        policy as its anchor, which vespo needs, the ratio of an objective already is the weight. An exact proximal
        policy would leave stale tokens without a clip.
        """
        if self.weight != "auto":
            return self
        if not has_ratio:
            return msgspec.structs.replace(self, weight="truncate")
        if self.anchor == "behavior" or loss.objective == "vespo":
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
    k2 that of KL(policy ‖ reference). Unset: k3 in the loss, k1 in the reward and the advantage."""
    place: Literal["loss", "reward", "advantage"] = "loss"
    """Where the KL applies. loss: added to each token's loss; reward: summed over the completion and
    subtracted from its reward, before the advantages; advantage: subtracted from each token's own advantage,
    after the advantages of the rewards, which may be absent (on-policy distillation)."""
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
        if self.place != "loss":  # rewards and advantages have no gradient
            unmet_needs["importance_weighted"] = 'place = "loss"'
        return unmet_needs

    def check(self) -> None:
        needed = {"constant": "coef", "linear": "final_coef", "target": "target"}[self.schedule]
        require(self._is_defined, f'schedule = "{self.schedule}" needs {needed}')
        if self.is_on and self.place != "loss":
            require(
                self.estimator in (None, "k1"),
                f'estimator = "{self.estimator}" with place = "{self.place}" moves the policy away from the reference '
                "where the two are close (see docs/kl-and-reference.md#estimators); set "
                'estimator = "k1", or place = "loss"',
            )
        if self.is_on and self.place == "loss":
            require(
                self.estimator != "k1" or self.importance_weighted,
                'estimator = "k1" with place = "loss": the expected gradient of log policy - log reference is zero; '
                'set importance_weighted = true, place = "reward" or "advantage", or another estimator',
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
        return self.estimator or ("k3" if self.place == "loss" else "k1")

    @property
    def is_on(self) -> bool:
        """True if the coefficient is ever above 0."""
        return self.coef > 0 or (self.schedule == "linear" and bool(self.final_coef))

    @property
    def is_advantage(self) -> bool:
        """True if every token's advantage holds the KL, so that a run may have no rewards."""
        return self.is_on and self.place == "advantage"

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
    scale: Literal["group", "batch", "mean", "none"] = "group"
    """Divisor of the advantages. group: the group's standard deviation (Bessel) + 1e-4; batch: that of the
    step; mean: the group's mean reward, for rewards of at least 0 (MaxRL, arXiv 2602.02710); none: no division
    (Dr. GRPO)."""
    combine: Literal["sum", "normalize_then_sum"] = "sum"
    """Combination of several reward functions. sum: add the rewards; normalize_then_sum: add the advantages
    of each function (GDPO)."""
    credit: Literal["episode", "turn", "gigpo"] = "episode"
    """Credit of an episode's turns (docs/credit.md). episode: all turns share the advantage of the episode; turn:
    each turn has its return-to-go, relative to the other episodes of the group; gigpo: the advantage of the
    episode plus that of each turn among the turns that began in the same state (GiGPO, arXiv 2505.10978)."""
    gamma: Share[float] | None = None
    """Discount of the rewards of later turns, with credit = turn or gigpo. Default: 1 for turn, 0.95 for gigpo. With
    turn and 1, the expected gradient is exactly that of the reward."""
    step_weight: NotNegativeFinite[float] = 1.0
    """Weight of the advantage among turns in the same state, with credit = gigpo (omega in the paper)."""
    function: str | None = None
    """Your own function in place of the other keys of this section: path/to/file.py:name or module:name
    (docs/custom-losses.md)."""

    def unmet_needs(self) -> dict[str, str]:
        if self.function is not None:
            others = ("baseline", "scale", "combine", "credit", "gamma", "step_weight")
            return dict.fromkeys(others, "advantage.function unset")
        unmet_needs = {} if self.credit == "gigpo" else {"step_weight": 'credit = "gigpo"'}
        return unmet_needs | ({"gamma": any_of("credit", ("turn", "gigpo"))} if self.credit == "episode" else {})

    @property
    def discount(self) -> float:
        """Gamma as set, or the default of the credit."""
        return self.gamma if self.gamma is not None else 0.95 if self.credit == "gigpo" else 1.0

    def check(self) -> None:
        require(
            self.function is None or is_plug_in(self.function),
            f"function = {self.function!r} is not path/to/file.py:name or module:name",
        )
