"""VESPO: a smooth weight of the whole completion's ratio."""

import torch

from learner.algorithm.contract import Losses, Tokens
from learner.algorithm.kl import clamped
from learner.config import LossConfig


def vespo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the VESPO loss, in which the importance weight of a completion is tapered on both sides.

        w = exp(Σ_t log r_t)
        phi = w^power exp(decay (1 - w)), so that phi = 1 at w = 1
        -stop_gradient(phi) A log p        with power and decay by the sign of A; arXiv 2602.10693

    A token counts as held if phi brings its gradient below half of the unclipped gradient, whose weight is w.
    """
    rising_BT = tokens.advantages_BT >= 0
    power_BT = torch.where(rising_BT, config.value("power_positive"), config.value("power_negative"))
    decay_BT = torch.where(rising_BT, config.value("decay_positive"), config.value("decay_negative"))
    log_w_B1 = clamped(tokens.log_ratio_BT.detach().sum(dim=1, keepdim=True))
    w_B1 = log_w_B1.exp()
    phi_BT = (power_BT * log_w_B1 + decay_BT * (1 - w_B1)).exp()
    held_BT = (phi_BT < w_B1 / 2) & (tokens.advantages_BT != 0) & tokens.mask_BT
    return -phi_BT * tokens.advantages_BT * tokens.logprobs_BT, held_BT
