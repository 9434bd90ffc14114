"""The off-policy correction: what a token's ratio is taken to, and how much a token counts that an older policy sampled.

Suffixes: B rows (completions), T predicted tokens (padded). Nothing here carries a gradient. Between the masked logprobs
and the objective; every log-ratio is 0 outside the mask.
"""

import msgspec
import torch

from learner.algorithm.kl import clamped
from learner.config import CorrectionConfig


class Multiplier(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How much each token's objective counts."""

    value_BT: torch.Tensor
    """0: left out."""
    outside_BT: torch.Tensor
    """Whether the importance weight lay outside its bounds."""
    stale_BT: torch.Tensor
    """Whether the token is staler than max_token_staleness."""


def anchor_logprobs(
    logprobs_BT: torch.Tensor,
    behaviour_BT: torch.Tensor,
    proximal_BT: torch.Tensor,
    staleness_BT: torch.Tensor,
    config: CorrectionConfig,
) -> torch.Tensor:
    """The logprobs that the objective's ratio is taken to.

    behaviour:             of the policy that sampled the token
    proximal, exact:       of the policy at the start of the step           (decoupled PPO, arXiv 2505.24298)
    proximal, log_linear:  behaviour + s / (s + 1) · (policy - behaviour), s the token's staleness: on the straight line
                           from the sampling policy to the one being trained, one version before its end (A-3PO, 2512.06547)
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
    advantages_B1: torch.Tensor,
    mask_BT: torch.Tensor,
    has_ratio: bool,
    config: CorrectionConfig,
) -> Multiplier:
    """Combine the importance weight, the sequence mask and the mask by staleness.

    `has_ratio`: the objective multiplies by its ratio to the anchor, which to the behaviour policy is the weight itself.
    """
    logprobs_BT, nothing_BT = logprobs_BT.detach(), torch.zeros_like(mask_BT)
    value_BT, outside_BT = mask_BT.float(), nothing_BT
    if config.weight != "none":
        is_decoupled = config.anchor == "proximal"
        weight_BT = importance_weight(
            (anchor_BT if is_decoupled else logprobs_BT) - behaviour_BT, mask_BT, config.level
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
        value_BT = torch.where((advantages_B1 < 0) & (drift_B1 > config.sequence_mask), 0.0, value_BT)
    stale_BT = nothing_BT
    if config.max_token_staleness is not None:
        stale_BT = mask_BT & (staleness_BT > config.max_token_staleness)
        value_BT = torch.where(stale_BT, config.stale_token_weight * value_BT, value_BT)
    return Multiplier(value_BT=value_BT, outside_BT=outside_BT, stale_BT=stale_BT)


def importance_weight(log_weight_BT: torch.Tensor, mask_BT: torch.Tensor, level: str) -> torch.Tensor:
    """exp of the log-weight of each token, of its sum over the completion, or of its mean (the geometric mean).

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
