"""Types of an objective: what it receives of a micro-batch, what it returns, and how it picks tokens of the step.

    StepTokens, LossConfig ─▶ pick ─▶ picked_N          (only for the objectives in PICKS)
    Tokens, LossConfig ─▶ objective ─▶ (loss_BT, held_BT)

r = exp(log_ratio) is the ratio of the policy to its anchor, the sampling or the proximal policy
(correction.py). A is the advantage. Suffixes: B rows (completions), T predicted tokens, N trained tokens of the
step, over all micro-batches and ranks.
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


class PickedTokens(Tokens, frozen=True, eq=False):
    """Inputs of an objective that treats some tokens of the step in a special way."""

    picked_BT: torch.Tensor
    """Tokens that the objective's `Pick` selected over the whole step."""


class StepTokens(msgspec.Struct, frozen=True, eq=False):
    """All trained tokens of a step, as the policy at its start sees them. No value carries a gradient."""

    log_ratio_N: torch.Tensor
    logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    random_N: torch.Tensor
    """Uniform random numbers that depend only on the seed, the version and the token's position in the step."""


Losses = tuple[torch.Tensor, torch.Tensor]
"""(loss_BT, held_BT). held_BT marks the tokens whose gradient the bound of the objective holds back, and only
where the bound is active."""

Objective = Callable[[PickedTokens, LossConfig], Losses]
"""An objective whose tokens are annotated as `Tokens` needs no picked tokens; it accepts both."""
Pick = Callable[[StepTokens, LossConfig], torch.Tensor]
"""Returns picked_N, whatever the order of the tokens."""
