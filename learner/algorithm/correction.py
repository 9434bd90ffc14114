"""Off-policy correction: the anchor of the importance ratio, and the multiplier of each token's objective.

The correction runs between the masked logprobs and the objective. No result carries a gradient. Every
log-ratio is 0 outside the mask.

Suffixes: B rows (completions), T predicted tokens (padded).
"""

import msgspec
import torch

from learner.algorithm.kl import clamped
from learner.config import OffPolicyCorrectionConfig


class Multiplier(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Multiplier of each token's objective."""

    value_BT: torch.Tensor
    """Multiplier of the token; 0: the token is left out."""
    outside_BT: torch.Tensor
    """Whether the importance weight lies outside its bounds."""
    stale_BT: torch.Tensor
    """Whether the staleness of the token exceeds max_token_staleness."""


def anchor_logprobs(
    logprobs_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    proximal_BT: torch.Tensor,
    staleness_BT: torch.Tensor,
    config: OffPolicyCorrectionConfig,
) -> torch.Tensor:
    """Return the anchor logprobs, the denominator of the objective's ratio.

        `behaviour`               the policy that sampled the token
        `proximal`, `exact`       the policy at the start of the step     (decoupled PPO, arXiv 2505.24298)
        `proximal`, `log_linear`  behavior + s / (s + 1) · (policy - behavior)     (A-3PO, arXiv 2512.06547)

    s is the token's staleness. `log_linear` lies on the straight line from the sampling policy to the policy
    being trained, one version before its end.
    """
    if config.anchor == "behaviour":
        return behaviour_BT
    if config.proximal == "exact":
        return proximal_BT
    share_BT = staleness_BT / (staleness_BT + 1)
    return behaviour_BT + share_BT * (logprobs_BT.detach() - behaviour_BT)


def multiplier(
    *,
    logprobs_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    anchor_BT: torch.Tensor,
    staleness_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    has_ratio: bool,
    config: OffPolicyCorrectionConfig,
) -> Multiplier:
    """Combine the importance weight, the sequence mask and the staleness mask.

    `has_ratio`: whether the objective multiplies by its ratio to the anchor. If the anchor is the behavior
    policy, that ratio is the importance weight itself.
    """
    logprobs_BT, nothing_BT = logprobs_BT.detach(), torch.zeros_like(mask_BT)
    value_BT, outside_BT = mask_BT.float(), nothing_BT
    if config.weight != "none":
        is_decoupled = config.anchor == "proximal"
        weight_BT = importance_weight(
            (anchor_BT if is_decoupled else logprobs_BT) - behaviour_BT, mask_BT, config.granularity
        )
        above_BT, below_BT = weight_BT > config.weight_bound, weight_BT < (config.min_weight or 0.0)
        outside_BT = mask_BT & (above_BT | below_BT)
        if config.weight == "truncate":
            value_BT = value_BT * weight_BT.clamp(max=config.weight_bound)
        else:
            kept_BT = torch.ones_like(weight_BT) if has_ratio and not is_decoupled else weight_BT
            value_BT = value_BT * torch.where(outside_BT, 0.0, kept_BT)
    if config.sequence_mask is not None:
        drift_B1 = _mean((behaviour_BT - logprobs_BT), mask_BT)
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


def _mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return values_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
