"""KL-Cov: the tokens of highest covariance pay for moving, which keeps up the entropy.

Suffixes: B rows (completions), T predicted tokens, N trained tokens of the step.
"""

import torch

from learner.algorithm.bounds import floored
from learner.algorithm.contract import Losses, PickedTokens, StepTokens
from learner.algorithm.covariance import covariances, lowest, num_picked
from learner.config import LossConfig


def kl_cov(tokens: PickedTokens, config: LossConfig) -> Losses:
    """Return the unclipped loss, with a penalty for the picked tokens.

        -r A + cov_penalty |log r| where picked        arXiv 2505.22617

    Where A < 0, r A is at least dual_clip · A as in `grpo`, because no clip bounds the ratio; with inf, this is
    the paper's loss.
    """
    surrogate_BT = tokens.log_ratio_BT.exp() * tokens.advantages_BT
    surrogate_BT, is_floored_BT = floored(surrogate_BT, tokens.advantages_BT, config)
    penalty_BT = config.value("cov_penalty") * tokens.log_ratio_BT.abs()
    return torch.where(tokens.picked_BT, penalty_BT, 0.0) - surrogate_BT, is_floored_BT


def kl_cov_pick(step: StepTokens, config: LossConfig) -> torch.Tensor:
    """Return the share cov_frac of the step's tokens that has the highest covariance."""
    return lowest(-covariances(step), num_picked(step, config))
