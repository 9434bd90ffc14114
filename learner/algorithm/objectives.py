"""Policy objectives: from a token's log-ratio and advantage to its loss.

Pure: loss.py masks, weights and sums.

Every objective returns (loss_BT, held_BT). held_BT marks the tokens whose gradient the bound of the objective
holds back, and only where the bound is active.

r = exp(log_ratio) is the ratio of the policy to its anchor, the sampling or the proximal policy
(correction.py). A is the advantage. Suffixes: B rows (completions), T predicted tokens.
"""

from collections.abc import Callable

import msgspec
import torch

from learner.config import LossConfig


class Tokens(msgspec.Struct, frozen=True, eq=False):
    """Inputs of an objective. Log-ratios and logprobs are 0 outside the mask."""

    log_ratio_BT: torch.Tensor
    logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor


Losses = tuple[torch.Tensor, torch.Tensor]


def grpo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the clipped loss of PPO and GRPO.

        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)        PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300

    Where A < 0, r A is at least dual_clip · A (dual-clip PPO, arXiv 1912.09729). This is also the two-sided
    clip delta of INTELLECT-2 (arXiv 2505.07291).
    """
    return _clipped(tokens.log_ratio_BT.exp(), tokens.advantages_BT, config)


def gspo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the clipped loss of `grpo` with a sequence-level ratio.

    s = exp(mean_t log r_t), shared by all tokens of the sequence        GSPO, arXiv 2507.18071
    """
    lengths_B1 = tokens.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    mean_log_ratio_B1 = tokens.log_ratio_BT.sum(dim=1, keepdim=True) / lengths_B1
    return _clipped(mean_log_ratio_B1.exp().expand_as(tokens.log_ratio_BT), tokens.advantages_BT, config)


def cispo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the CISPO loss, in which no token loses its gradient.

    -stop_gradient(min(r, 1 + clip_high)) A log p        MiniMax-M1, arXiv 2506.13585
    """
    bound = 1 + config.value("clip_high")
    ratio_BT = tokens.log_ratio_BT.detach().exp()
    return -ratio_BT.clamp(max=bound) * tokens.advantages_BT * tokens.logprobs_BT, (ratio_BT > bound) & (
        tokens.advantages_BT != 0
    )


def sapo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the SAPO loss, which has a soft gate instead of a clip.

        -(4 / tau) sigmoid(tau (r - 1)) A, with tau by the sign of A        arXiv 2511.20347

    A token counts as held if the gate brings its gradient below half of the unclipped gradient.
    """
    tau_BT = torch.where(tokens.advantages_BT > 0, config.value("tau_positive"), config.value("tau_negative"))
    gate_BT = torch.sigmoid(tau_BT * (tokens.log_ratio_BT.exp() - 1))
    closed_BT = (4 * gate_BT * (1 - gate_BT)).detach() < 0.5
    return -4 / tau_BT * gate_BT * tokens.advantages_BT, closed_BT & (tokens.advantages_BT != 0)


def dppo(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the loss with a trust region in probability instead of in ratio.

        -keep r A + log_ratio_penalty (log r)²

    keep = 0 once p - p_anchor has moved beyond tv_high (A > 0) or tv_low (A < 0) in the direction of A. Rare
    tokens are therefore not held back. This is prime-rl's default (2026). Where A < 0, r A is at least
    dual_clip · A as in `grpo`, because no probability bounds the ratio there.
    """
    anchor_logprobs_BT = tokens.logprobs_BT - tokens.log_ratio_BT
    moved_BT = (tokens.logprobs_BT.exp() - anchor_logprobs_BT.exp()).detach()
    rising_BT, falling_BT = tokens.advantages_BT > 0, tokens.advantages_BT < 0
    held_BT = (rising_BT & (moved_BT > config.value("tv_high"))) | (falling_BT & (moved_BT < -config.value("tv_low")))
    surrogate_BT = torch.where(held_BT, 0.0, tokens.log_ratio_BT.exp() * tokens.advantages_BT)
    surrogate_BT, is_floored_BT = _floored(surrogate_BT, tokens.advantages_BT, config)
    return -surrogate_BT + config.value("log_ratio_penalty") * tokens.log_ratio_BT**2, held_BT | is_floored_BT


def reinforce(tokens: Tokens, config: LossConfig) -> Losses:
    """Return the REINFORCE loss, -A log p (Williams 1992).

    It has no importance ratio, so it is correct only on-policy.
    """
    return -tokens.advantages_BT * tokens.logprobs_BT, torch.zeros_like(tokens.mask_BT)


OBJECTIVES: dict[str, Callable[[Tokens, LossConfig], Losses]] = {
    function.__name__: function for function in (grpo, gspo, cispo, sapo, dppo, reinforce)
}


def _clipped(ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, config: LossConfig) -> Losses:
    surrogate_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - config.value("clip_low"), 1 + config.value("clip_high")) * advantages_BT
    objective_BT, held_BT = torch.minimum(surrogate_BT, clipped_BT), clipped_BT < surrogate_BT
    objective_BT, is_floored_BT = _floored(objective_BT, advantages_BT, config)
    return -objective_BT, held_BT | is_floored_BT


def _floored(
    objective_BT: torch.Tensor, advantages_BT: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the floor dual_clip · A where A < 0; also return where it binds."""
    floor_BT = torch.where(advantages_BT < 0, config.value("dual_clip") * advantages_BT, -torch.inf)
    return torch.maximum(objective_BT, floor_BT), objective_BT < floor_BT
