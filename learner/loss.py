"""The objective: pure tensors in, `(loss, sums)` out. Between the model's logprobs and the backward pass.

Suffixes: B rows (completions), T predicted tokens (padded).
Legend: mask_BT is 1 on the tokens that are trained on; everything under a 0 may be garbage, NaN included.
"""

import torch

from learner.config import LossConfig

LOG_RATIO_BOUND = 20.0
"""exp(20) is finite in float32; a larger mismatch of server and learner must not overflow."""


def grpo_loss(
    *,
    logprobs_BT: torch.Tensor,
    behaviour_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    reference_logprobs_BT: torch.Tensor | None,
    num_tokens: int,
    config: LossConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped objective against the behaviour policy plus kl_coef times k3, summed over tokens / num_tokens.

    l_t = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logp - logp_behaviour)   (PPO, arXiv 1707.06347 eq. 7)
    k3  = exp(d) - d - 1, d = logp_reference - logp                                 (Schulman 2020, "Approximating KL")

    `num_tokens` is the exact count over all micro-batches and ranks of the optimizer step, so losses of micro-batches add
    up. Tokens whose behaviour logprob is not finite are left out of the loss. `sums` are sums over trained tokens, to be
    added over micro-batches and divided by their "tokens".
    """
    mask_BT = mask_BT.bool() & torch.isfinite(behaviour_logprobs_BT)
    log_ratio_BT = _masked_difference(logprobs_BT, behaviour_logprobs_BT, mask_BT)
    ratio_BT = log_ratio_BT.exp()
    advantages_BT = advantages_B.float().unsqueeze(1)
    surrogate_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_BT
    policy_loss = -torch.where(mask_BT, torch.minimum(surrogate_BT, clipped_BT), 0.0).sum() / num_tokens

    loss = policy_loss
    sums = {
        "tokens": mask_BT.sum(),
        "loss": policy_loss.detach() * num_tokens,
        "clipped": (mask_BT & (clipped_BT < surrogate_BT)).sum(),
        "mismatch_kl": torch.where(mask_BT, ratio_BT - log_ratio_BT - 1, 0.0).sum(),
    }
    if reference_logprobs_BT is not None:
        log_ratio_to_reference_BT = _masked_difference(reference_logprobs_BT, logprobs_BT, mask_BT)
        k3_BT = log_ratio_to_reference_BT.exp() - log_ratio_to_reference_BT - 1
        kl = torch.where(mask_BT, k3_BT, 0.0).sum() / num_tokens
        loss = loss + config.kl_coef * kl
        sums["reference_kl"] = kl.detach() * num_tokens
    return loss, {name: value.detach().float() for name, value in sums.items()}


def _masked_difference(left_BT: torch.Tensor, right_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """left - right in fp32, 0 outside the mask, clamped. The mask comes before any arithmetic: NaN · 0 is NaN."""
    left_BT = torch.where(mask_BT, left_BT.float(), 0.0)
    right_BT = torch.where(mask_BT, right_BT.float(), 0.0)
    return (left_BT - right_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
