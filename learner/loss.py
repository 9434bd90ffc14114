"""The loss of a micro-batch: pure tensors in, `(loss, sums)` out. Between the model's logprobs and the backward pass.

Suffixes: B rows (completions), T predicted tokens (padded).
Legend: mask_BT is 1 on the tokens that are trained on; everything under a 0 may be garbage, NaN included.
"""

import torch

from learner.config import LossConfig
from learner.objectives import OBJECTIVES, Tokens

LOG_RATIO_BOUND = 20.0
"""exp(20) is finite in float32; a larger mismatch of server and learner must not overflow."""


def policy_loss(
    *,
    logprobs_BT: torch.Tensor,
    behaviour_logprobs_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    weights_B: torch.Tensor,
    mask_BT: torch.Tensor,
    reference_logprobs_BT: torch.Tensor | None,
    config: LossConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The objective plus kl_coef times the KL to the reference, each token weighed by its row's weight and summed.

    Weights make the losses of micro-batches and ranks add up to the step's. Tokens whose behaviour logprob is not finite
    are left out. `sums` are sums over trained tokens, to be added over micro-batches and divided by their "tokens"; "loss"
    is already weighed.
    """
    mask_BT = mask_BT.bool() & torch.isfinite(behaviour_logprobs_BT)
    logprobs_BT = _masked(logprobs_BT, mask_BT)
    log_ratio_BT = _log_ratio(logprobs_BT, _masked(behaviour_logprobs_BT, mask_BT))
    tokens = Tokens(log_ratio_BT, logprobs_BT, advantages_B.float().unsqueeze(1), mask_BT)
    token_loss_BT, held_BT = OBJECTIVES[config.objective](tokens, config)
    weights_B1 = weights_B.float().unsqueeze(1)
    loss = (weights_B1 * _masked(token_loss_BT, mask_BT)).sum()
    sums = {
        "tokens": mask_BT.sum(),
        "loss": loss.detach(),
        "clipped": (mask_BT & held_BT).sum(),
        "mismatch_kl": (log_ratio_BT.detach().exp() - log_ratio_BT.detach() - 1).sum(),
    }
    if reference_logprobs_BT is not None:
        kl_BT = kl_estimate(_log_ratio(_masked(reference_logprobs_BT, mask_BT), logprobs_BT), config.kl_estimator)
        loss = loss + config.kl_coef * (weights_B1 * kl_BT).sum()
        sums["reference_kl"] = kl_BT.detach().sum()
    return loss, {name: value.float() for name, value in sums.items()}


def kl_estimate(d_BT: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate the KL of the policy from the reference by d = logp_reference - logp  (Schulman 2020, "Approximating KL").

    As a loss, the expected gradient of k1 is zero and that of k3 only near the KL's; that of k2 is the KL's.
    """
    match estimator:
        case "k1":
            return -d_BT
        case "k2":
            return d_BT**2 / 2
        case "k3":
            return d_BT.exp() - d_BT - 1
        case "k3_grad_k2":
            k2_BT, k3_BT = d_BT**2 / 2, d_BT.exp() - d_BT - 1
            return k2_BT + (k3_BT - k2_BT).detach()
    raise ValueError(f"unknown KL estimator {estimator!r}")


def _masked(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """In float32, 0 outside the mask: selected before any arithmetic, for NaN · 0 is NaN, in gradients too."""
    return torch.where(mask_BT, values_BT.float(), 0.0)


def _log_ratio(left_BT: torch.Tensor, right_BT: torch.Tensor) -> torch.Tensor:
    return (left_BT - right_BT).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
