"""CISPO: the ratio as a capped weight."""

from learner.algorithm.contract import Losses, Tokens
from learner.config import LossConfig


def cispo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the CISPO loss, in which no token loses its gradient.

    -stop_gradient(min(r, 1 + clip_high)) A log p        MiniMax-M1, arXiv 2506.13585
    """
    bound = 1 + config.value("clip_high")
    ratio_BT = tokens.log_ratio_BT.detach().exp()
    return -ratio_BT.clamp(max=bound) * tokens.advantages_BT * tokens.logprobs_BT, (ratio_BT > bound) & (
        tokens.advantages_BT != 0
    )
