"""GSPO: the clip per sequence."""

from learner.algorithm.bounds import clipped, mean_log_ratio
from learner.algorithm.contract import Losses, Tokens
from learner.config import LossConfig


def gspo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the clipped loss of `grpo` with a sequence-level ratio.

        s = exp(mean_t log r_t), shared by all tokens of the sequence        GSPO, arXiv 2507.18071

    With normalization = "sequence_sum", this is LUSPO (arXiv 2602.05261).
    """
    ratio_B1 = mean_log_ratio(tokens.log_ratio_BT, tokens.mask_BT).exp()
    return clipped(ratio_B1.expand_as(tokens.log_ratio_BT), tokens.advantages_BT, config)
