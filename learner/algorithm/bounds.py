"""Bounds that several objectives share: PPO's clip, the dual clip, a trust region in probability.

Suffixes: B rows (completions), T predicted tokens.
"""

import torch

from learner.algorithm.contract import Losses, Tokens
from learner.config import LossConfig


def clipped(ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, config: LossConfig) -> Losses:
    """Return the loss with PPO's clip (arXiv 1707.06347) and the dual clip."""
    surrogate_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - config.value("clip_low"), 1 + config.value("clip_high")) * advantages_BT
    objective_BT, held_BT = torch.minimum(surrogate_BT, clipped_BT), clipped_BT < surrogate_BT
    objective_BT, is_floored_BT = floored(objective_BT, advantages_BT, config)
    return -objective_BT, held_BT | is_floored_BT


def floored(
    objective_BT: torch.Tensor, advantages_BT: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the floor dual_clip · A where A < 0; also return where it binds (arXiv 1912.09729)."""
    floor_BT = torch.where(advantages_BT < 0, config.value("dual_clip") * advantages_BT, -torch.inf)
    return torch.maximum(objective_BT, floor_BT), objective_BT < floor_BT


def moved_probability(tokens: Tokens) -> torch.Tensor:
    """Return p - p_anchor of each token, without a gradient."""
    anchor_logprobs_BT = tokens.logprobs_BT - tokens.log_ratio_BT
    return (tokens.logprobs_BT.exp() - anchor_logprobs_BT.exp()).detach()


def kept_ratio(tokens: Tokens, held_BT: torch.Tensor, config: LossConfig) -> Losses:
    """Return -keep r A + log_ratio_penalty (log r)², with the dual clip. keep is 0 where `held_BT`."""
    surrogate_BT = torch.where(held_BT, 0.0, tokens.log_ratio_BT.exp() * tokens.advantages_BT)
    surrogate_BT, is_floored_BT = floored(surrogate_BT, tokens.advantages_BT, config)
    return -surrogate_BT + config.value("log_ratio_penalty") * tokens.log_ratio_BT**2, held_BT | is_floored_BT


def mean_log_ratio(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the mean over each row's trained tokens, shape (B, 1)."""
    return log_ratio_BT.sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
