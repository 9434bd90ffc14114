"""The KL of the policy from the reference: its estimate per token and its coefficient over the run. Pure.

Suffixes: B rows (completions), T predicted tokens (padded).
"""

import torch

from learner.loss_config import KlConfig

MAX_RELATIVE_ERROR = 0.2


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


def next_coef(config: KlConfig, coef: float, *, version: int, num_steps: int, measured_kl: float | None) -> float:
    """The coefficient of the step that trains `version`, after a step with `coef` measured a mean KL per token.

    linear:  coef + (final_coef - coef) · version / (num_steps - 1)
    target:  coef · (1 + clip(KL / target - 1, ±0.2) / horizon_steps)             (Ziegler et al., arXiv 1909.08593)
    """
    match config.schedule:
        case "linear":
            assert config.final_coef is not None
            return config.coef + (config.final_coef - config.coef) * min(1.0, version / max(1, num_steps - 1))
        case "target" if measured_kl is not None:
            assert config.target is not None
            error = min(max(measured_kl / config.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
            return coef * (1 + error / config.horizon_steps)
    return coef
