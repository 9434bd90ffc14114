"""Off-policy correction: the anchor of the importance ratio, and the multiplier of each token's objective.

The correction runs between the masked logprobs and the objective. No result carries a gradient. Every
log-ratio is 0 outside the mask.

Suffixes: B rows (completions), T predicted tokens (padded).
"""

import msgspec
import torch

from learner.algorithm.kl import clamped
from learner.config import OffPolicyCorrectionConfig

MIN_REST = 1e-12
"""Lower bound on the probability of all other tokens."""


class Multiplier(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Multiplier of each token's objective."""

    value_BT: torch.Tensor
    """Multiplier of the token; 0: the token is left out."""
    outside_BT: torch.Tensor
    """Whether the importance weight or the binary KL lies outside its bounds."""
    stale_BT: torch.Tensor
    """Whether the staleness of the token exceeds max_token_staleness."""


def anchor_logprobs(
    logprobs_BT: torch.Tensor,
    behavior_BT: torch.Tensor,
    proximal_BT: torch.Tensor,
    staleness_BT: torch.Tensor,
    config: OffPolicyCorrectionConfig,
) -> torch.Tensor:
    """Return the anchor logprobs, the denominator of the objective's ratio.

        `behavior`               the policy that sampled the token
        `proximal`, `exact`       the policy at the start of the step     (decoupled PPO, arXiv 2505.24298)
        `proximal`, `log_linear`  behavior + s / (s + 1) · (policy - behavior)     (A-3PO, arXiv 2512.06547)

    s is the token's staleness. `log_linear` lies on the straight line from the sampling policy to the policy
    being trained, one version before its end.
    """
    if config.anchor_used == "behavior":
        return behavior_BT
    if config.proximal == "exact":
        return proximal_BT
    share_BT = staleness_BT / (staleness_BT + 1)
    return behavior_BT + share_BT * (logprobs_BT.detach() - behavior_BT)


def multiplier(
    *,
    logprobs_BT: torch.Tensor,
    behavior_BT: torch.Tensor,
    anchor_BT: torch.Tensor,
    staleness_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    has_ratio: bool,
    config: OffPolicyCorrectionConfig,
) -> Multiplier:
    """Combine the importance weight, the KL mask, the sequence mask and the staleness mask.

    `has_ratio`: whether the objective multiplies by its ratio to the anchor. If the anchor is the behavior
    policy, that ratio is the importance weight itself.
    """
    logprobs_BT, nothing_BT = logprobs_BT.detach(), torch.zeros_like(mask_BT)
    value_BT, outside_BT = mask_BT.float(), nothing_BT
    is_decoupled = config.anchor_used == "proximal"
    policy_BT = anchor_BT if is_decoupled else logprobs_BT
    if config.weight_used != "none":
        weight_BT = importance_weight(policy_BT - behavior_BT, mask_BT, config.granularity)
        if config.weighted_completions == "negative":
            weight_BT = torch.where(advantages_BT < 0, weight_BT, 1.0)
        above_BT, below_BT = weight_BT > config.weight_bound, weight_BT < (config.min_weight or 0.0)
        outside_BT = mask_BT & (above_BT | below_BT)
        if config.weight_used == "truncate":
            value_BT = value_BT * weight_BT.clamp(min=config.min_weight, max=config.weight_bound)
        else:
            kept_BT = torch.ones_like(weight_BT) if has_ratio and not is_decoupled else weight_BT
            value_BT = value_BT * torch.where(outside_BT, 0.0, kept_BT)
    if config.max_binary_kl is not None:
        is_far_BT = mask_BT & ~(binary_kl(policy_BT, behavior_BT) <= config.max_binary_kl)
        value_BT, outside_BT = torch.where(is_far_BT, 0.0, value_BT), outside_BT | is_far_BT
    if config.sequence_mask is not None:
        drift_B1 = _mean((behavior_BT - logprobs_BT), mask_BT)
        value_BT = torch.where((advantages_BT < 0) & (drift_B1 > config.sequence_mask), 0.0, value_BT)
    stale_BT = nothing_BT
    if config.max_token_staleness is not None:
        stale_BT = mask_BT & (staleness_BT > config.max_token_staleness)
        value_BT = torch.where(stale_BT, config.stale_token_weight * value_BT, value_BT)
    return Multiplier(value_BT=value_BT, outside_BT=outside_BT, stale_BT=stale_BT)


def importance_weight(log_weight_BT: torch.Tensor, mask_BT: torch.Tensor, level: str) -> torch.Tensor:
    """Return the importance weight of each token.

        token        exp of the token's log-weight
        sequence     exp of the sum over the completion
        geometric    exp of the mean over the completion

    The sum makes long completions count as outliers; the mean does not (TRL issue 4772).
    """
    log_weight_BT = clamped(log_weight_BT)
    if level == "token":
        return log_weight_BT.exp()
    if level == "sequence":
        return clamped(log_weight_BT.sum(dim=1, keepdim=True)).exp().expand_as(log_weight_BT)
    return _mean(log_weight_BT, mask_BT).exp().expand_as(log_weight_BT)


def binary_kl(logprobs_BT: torch.Tensor, others_BT: torch.Tensor) -> torch.Tensor:
    """Return the larger of both KLs between two policies of the event that the token is sampled.

        p log(p / q) + (1 - p) log((1 - p) / (1 - q))        KPop, ringtech.notion.site/kpop

    1 - p counts at least MIN_REST, because a logprob of 0 leaves no other event.
    """

    def kl(p_BT: torch.Tensor, q_BT: torch.Tensor) -> torch.Tensor:
        rest_p_BT, rest_q_BT = ((-torch.expm1(x_BT)).clamp(min=MIN_REST) for x_BT in (p_BT, q_BT))
        return p_BT.exp() * clamped(p_BT - q_BT) + rest_p_BT * (rest_p_BT.log() - rest_q_BT.log())

    return torch.maximum(kl(logprobs_BT, others_BT), kl(others_BT, logprobs_BT))


def _mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return values_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
