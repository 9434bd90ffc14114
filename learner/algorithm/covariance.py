"""Covariance of a token's logprob and advantage, which drives the entropy of the policy down.

Suffix: N trained tokens of the step.
"""

import torch

from learner.algorithm.contract import StepTokens
from learner.config import LossConfig


def covariances(step: StepTokens) -> torch.Tensor:
    """Return (log p - mean log p) (A - mean A) of each token, in float64.

    Both means are over the tokens of the step (arXiv 2505.22617).
    """
    logprobs_N, advantages_N = step.logprobs_N.double(), step.advantages_N.double()
    return (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())


def num_picked(step: StepTokens, config: LossConfig) -> int:
    """Return how many tokens cov_frac stands for: at least one, if the step has any."""
    return min(len(step.logprobs_N), max(1, int(config.value("cov_frac") * len(step.logprobs_N))))


def lowest(values_N: torch.Tensor, num: int) -> torch.Tensor:
    """Return a mask of the `num` lowest finite values, or of all finite ones if there are fewer."""
    mask_N = torch.zeros_like(values_N, dtype=torch.bool)
    mask_N[values_N.topk(min(num, int(values_N.isfinite().sum())), largest=False).indices] = True
    return mask_N
