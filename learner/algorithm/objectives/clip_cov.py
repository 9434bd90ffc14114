"""Clip-Cov: some tokens of high covariance lose their gradient, which keeps up the entropy.

Suffixes: B rows (completions), T predicted tokens, N trained tokens of the step.
"""

import torch

from learner.algorithm.bounds import clipped
from learner.algorithm.contract import Losses, PickedTokens, StepTokens
from learner.algorithm.covariance import covariances, lowest, num_picked
from learner.config import LossConfig


def clip_cov(tokens: PickedTokens, config: LossConfig) -> Losses:
    """Return the clipped loss of `grpo`, in which picked tokens have no gradient (arXiv 2505.22617)."""
    loss_BT, held_BT = clipped(tokens.log_ratio_BT.exp(), tokens.advantages_BT, config)
    return torch.where(tokens.picked_BT, 0.0, loss_BT), held_BT | tokens.picked_BT


def clip_cov_pick(step: StepTokens, config: LossConfig) -> torch.Tensor:
    """Return a random share cov_frac of the step's tokens whose covariance is between cov_low and cov_high.

    Tokens that PPO's clip holds back anyway are not picked.
    """
    covariances_N, ratio_N = covariances(step), step.log_ratio_N.exp()
    too_high_N = (step.advantages_N > 0) & (ratio_N > 1 + config.value("clip_high"))
    too_low_N = (step.advantages_N < 0) & (ratio_N < 1 - config.value("clip_low"))
    in_band_N = (covariances_N > config.value("cov_low")) & (covariances_N < config.value("cov_high"))
    candidates_N = in_band_N & ~too_high_N & ~too_low_N
    return lowest(torch.where(candidates_N, step.random_N, torch.inf), num_picked(step, config))
