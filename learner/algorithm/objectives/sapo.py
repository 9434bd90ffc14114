"""SAPO: a soft gate instead of a clip."""

import torch

from learner.algorithm.contract import Losses, Tokens
from learner.config import LossConfig


def sapo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the SAPO loss, which has a soft gate instead of a clip.

        -(4 / tau) sigmoid(tau (r - 1)) A, with tau by the sign of A        arXiv 2511.20347

    A token counts as held if the gate brings its gradient below half of the unclipped gradient.
    """
    tau_BT = torch.where(tokens.advantages_BT > 0, config.value("tau_positive"), config.value("tau_negative"))
    gate_BT = torch.sigmoid(tau_BT * (tokens.log_ratio_BT.exp() - 1))
    closed_BT = (4 * gate_BT * (1 - gate_BT)).detach() < 0.5
    return -4 / tau_BT * gate_BT * tokens.advantages_BT, closed_BT & (tokens.advantages_BT != 0)
