"""DPPO: a trust region in probability, in the direction of the advantage."""

from learner.algorithm.bounds import kept_ratio, moved_probability
from learner.algorithm.contract import Losses, Tokens
from learner.config import LossConfig


def dppo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the loss with a trust region in probability instead of in ratio.

        -keep r A + log_ratio_penalty (log r)²        DPPO-Binary-TV, arXiv 2602.04879; Kimi K2.5, arXiv 2602.02276

    keep = 0 once p - p_anchor has moved beyond tv_high (A > 0) or tv_low (A < 0) in the direction of A. Rare
    tokens are therefore not held back. Where A < 0, r A is at least dual_clip · A as in `grpo`, because no
    probability bounds the ratio there.
    """
    moved_BT = moved_probability(tokens)
    rising_BT, falling_BT = tokens.advantages_BT > 0, tokens.advantages_BT < 0
    held_BT = (rising_BT & (moved_BT > config.value("tv_high"))) | (falling_BT & (moved_BT < -config.value("tv_low")))
    return kept_ratio(tokens, held_BT, config)
