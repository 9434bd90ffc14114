"""GRPO and PPO: the clip per token."""

from learner.algorithm.bounds import clipped
from learner.algorithm.contract import Losses, Tokens
from learner.config import LossConfig


def grpo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the clipped loss of PPO and GRPO.

        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)        PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300

    Where A < 0, r A is at least dual_clip · A (dual-clip PPO, arXiv 1912.09729). This is also the two-sided
    clip delta of INTELLECT-2 (arXiv 2505.07291).
    """
    return clipped(tokens.log_ratio_BT.exp(), tokens.advantages_BT, config)
