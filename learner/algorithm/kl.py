"""Safe arithmetic on log-ratios of two policies over the same tokens, and the KL estimated from them. Pure.

Suffixes: B rows (completions), T predicted tokens (padded).
"""

import torch

LOG_RATIO_BOUND = 20.0
"""Bound on log-ratios: exp(20) is finite in float32, so no mismatch of server and learner overflows."""
MEASURE = "k3"
"""Estimator of `reference/kl`, whatever the penalty uses: unbiased, nonnegative, less noisy than k1."""


def kl_estimate(d_BT: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate the KL of the policy from the reference by d = logp_reference - logp.

    The estimators (Schulman 2020, "Approximating KL") agree in expectation, k2 nearly. Their gradients do not
    (arXiv 2512.21852). On samples of the policy:

                in the loss, E[∇k]                 in the reward, E[k ∇log p]
        k1      0: rejected                        ∇KL(policy‖reference)
        k2      ∇KL(policy‖reference)              not the gradient of a KL: rejected
        k3      ∇KL(reference‖policy)              ∇KL(policy‖reference) - ∇KL(reference‖policy): rejected

    The first-order terms of this last difference cancel. Near the reference, the rest leads away from the
    reference.
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


def masked(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the values in float32, 0 outside the mask.

    The selection precedes any arithmetic, because NaN · 0 is NaN, in gradients too.
    """
    return torch.where(mask_BT, values_BT.float(), 0.0)


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the log-ratio clamped to ±LOG_RATIO_BOUND."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
