"""Log-ratios of two policies' probabilities of the same tokens: the safe arithmetic under every loss, and the KL made of them.

Pure. Suffixes: B rows (completions), T predicted tokens (padded).
"""

import torch

LOG_RATIO_BOUND = 20.0
"""exp(20) is finite in float32; a larger mismatch of server and learner must not overflow."""
MEASURE = "k3"
"""The estimator behind `reference/kl`, whatever the penalty's is: unbiased, never negative, and less noisy than k1."""


def kl_estimate(d_BT: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate the KL of the policy from the reference by d = logp_reference - logp  (Schulman 2020, "Approximating KL").

    Their values agree in expectation (k2's nearly), their gradients do not (arXiv 2512.21852). On samples of the policy:

                in the loss, E[∇k]                 in the reward, E[k ∇log p]
        k1      0: refused                         ∇KL(policy‖reference)
        k2      ∇KL(policy‖reference)              no KL's gradient: refused
        k3      ∇KL(reference‖policy)              ∇KL(policy‖reference) - ∇KL(reference‖policy): refused

    The first orders of that last difference cancel, so what is left leads away from the reference near it.
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
    """In float32, 0 outside the mask: selected before any arithmetic, for NaN · 0 is NaN, in gradients too."""
    return torch.where(mask_BT, values_BT.float(), 0.0)


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the log-ratio within ±LOG_RATIO_BOUND."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
