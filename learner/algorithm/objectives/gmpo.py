"""GMPO: the geometric mean of clipped token ratios."""

import torch

from learner.algorithm.bounds import floored, mean_log_ratio
from learner.algorithm.contract import Losses, Tokens
from learner.config import LossConfig


def gmpo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the loss of the geometric mean of the clipped ratios.

        c_t = min(log r_t, clip_high) if A > 0, max(log r_t, -clip_low) if A < 0
        -exp(mean_t c_t) A, shared by all tokens of the sequence             GMPO, arXiv 2507.20673

    Both bounds are on the log-ratio. Where A < 0, exp(mean_t c_t) A is at least dual_clip · A.
    """
    log_ratio_BT, rising_BT = tokens.log_ratio_BT, tokens.advantages_BT > 0
    low, high = config.value("clip_low"), config.value("clip_high")
    clipped_BT = torch.where(rising_BT, log_ratio_BT.clamp(max=high), log_ratio_BT.clamp(min=-low))
    objective_BT = mean_log_ratio(clipped_BT, tokens.mask_BT).exp() * tokens.advantages_BT
    objective_BT, is_floored_BT = floored(objective_BT, tokens.advantages_BT, config)
    held_BT = torch.where(rising_BT, log_ratio_BT > high, log_ratio_BT < -low) & (tokens.advantages_BT != 0)
    return -objective_BT, held_BT | is_floored_BT
