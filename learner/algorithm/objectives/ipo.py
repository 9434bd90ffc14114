"""IPO: a trust region in probability on both sides."""

from learner.algorithm.bounds import kept_ratio, moved_probability
from learner.algorithm.contract import Losses, Tokens
from learner.config import LossConfig


def ipo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the loss of INTELLECT Policy Optimization, the default of prime-rl.

        -keep r A + log_ratio_penalty (log r)²        docs.primeintellect.ai/prime-rl/ipo

    keep = 0 once p - p_anchor is above tv_high or below -tv_low, whatever the sign of A: a token whose
    probability moved that far is noise of the sampler rather than signal. The dual clip is that of `dppo`; with
    inf, this is prime-rl's loss.
    """
    moved_BT = moved_probability(tokens)
    is_far_BT = (moved_BT > config.value("tv_high")) | (moved_BT < -config.value("tv_low"))
    return kept_ratio(tokens, is_far_BT & (tokens.advantages_BT != 0), config)
