"""REINFORCE: no ratio."""

import torch

from learner.algorithm.contract import Losses, Tokens
from learner.config import LossConfig


def reinforce(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the REINFORCE loss, -A log p (Williams 1992).

    It has no importance ratio, so it is correct only on-policy, or with an importance weight of
    `learner.off_policy_correction`.
    """
    return -tokens.advantages_BT * tokens.logprobs_BT, torch.zeros_like(tokens.mask_BT)
