"""Compute the loss of a micro-batch: pure tensors in, `(loss, sums)` out.

    multiplier · objective(ratio to anchor, advantage) + kl_coef · KL to reference - entropy_coef · entropy
    correction.py   objectives/                                    kl.py

Suffixes: B rows (completions), T predicted tokens (padded).
Legend: mask_BT is 1 on the trained tokens; everything under a 0 may be garbage, NaN included.
"""

import msgspec
import torch

from learner.algorithm.correction import anchor_logprobs, multiplier
from learner.algorithm.kl import MEASURE, clamped, kl_estimate, masked
from learner.algorithm.objectives import PICKS, PickedTokens
from learner.algorithm.plug_in import has_ratio, objective_of
from learner.config import KlConfig, LossConfig, OffPolicyCorrectionConfig

NUM_LENGTH_QUARTERS = 4

Sums = dict[str, torch.Tensor]


class LossInputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Inputs of the loss of one micro-batch.

    Only `logprobs_BT` and `entropy_BT` carry a gradient.
    """

    logprobs_BT: torch.Tensor
    behavior_logprobs_BT: torch.Tensor
    """Behavior logprobs. A token with a non-finite behavior logprob is left out of everything."""
    staleness_BT: torch.Tensor
    """Policy versions between the sampling of the token and the start of the step."""
    advantages_BT: torch.Tensor
    weights_B: torch.Tensor
    """Weight of each token of the row. The losses of micro-batches and ranks add up to the step's loss."""
    mask_BT: torch.Tensor
    proximal_logprobs_BT: torch.Tensor | None = None
    """Logprobs of the policy at the start of the step; None: the current policy is that policy."""
    reference_logprobs_BT: torch.Tensor | None = None
    entropy_BT: torch.Tensor | None = None
    policy_mask_BT: torch.Tensor | None = None
    """Tokens that carry the objective; None: all. KL and entropy always cover all trained tokens."""
    picked_BT: torch.Tensor | None = None
    """Tokens that the objective picked over the whole step; None: it picks none."""
    length_quarter_B: torch.Tensor | None = None
    """Quarter of max_tokens that holds the completion's length, 0 to 3; None: no sums by length."""


def policy_loss(
    inputs: LossInputs,
    config: LossConfig,
    correction: OffPolicyCorrectionConfig,
    kl: KlConfig,
    kl_coef: float,
    entropy_coef: float,
) -> tuple[torch.Tensor, Sums]:
    """Return the weighted loss of a micro-batch, and sums over its trained tokens.

    Both coefficients are those of the step, which a schedule or a target may have changed.

    The caller adds up the sums over micro-batches and divides them by `tokens`. The sum `loss` holds only the
    objective and is already weighted.
    """
    mask_BT = inputs.mask_BT.bool() & torch.isfinite(inputs.behavior_logprobs_BT)
    weights_B1 = inputs.weights_B.float().unsqueeze(1)
    logprobs_BT, behavior_BT = masked(inputs.logprobs_BT, mask_BT), masked(inputs.behavior_logprobs_BT, mask_BT)
    proximal = inputs.logprobs_BT.detach() if inputs.proximal_logprobs_BT is None else inputs.proximal_logprobs_BT
    staleness_BT = masked(inputs.staleness_BT, mask_BT)
    anchor_BT = anchor_logprobs(logprobs_BT, behavior_BT, masked(proximal, mask_BT), staleness_BT, correction)

    assert inputs.picked_BT is not None or config.objective not in PICKS
    picked_BT = torch.zeros_like(mask_BT) if inputs.picked_BT is None else inputs.picked_BT & mask_BT
    advantages_BT = token_advantages(inputs, kl, kl_coef)
    tokens = PickedTokens(clamped(logprobs_BT - anchor_BT), logprobs_BT, advantages_BT, mask_BT, picked_BT)
    objective_BT, held_BT = objective_of(config.objective)(tokens, config)
    counts = multiplier(
        logprobs_BT=logprobs_BT,
        behavior_BT=behavior_BT,
        anchor_BT=anchor_BT,
        staleness_BT=staleness_BT,
        advantages_BT=advantages_BT,
        mask_BT=mask_BT,
        has_ratio=has_ratio(config.objective),
        config=correction,
    )
    kept_BT = counts.value_BT != 0
    if inputs.policy_mask_BT is not None:
        kept_BT = kept_BT & inputs.policy_mask_BT
    loss = (weights_B1 * counts.value_BT * masked(objective_BT, kept_BT)).sum()

    to_behavior_BT = clamped(logprobs_BT - behavior_BT)
    ratio_BT = masked(to_behavior_BT.detach().exp(), mask_BT)
    sums = {
        "tokens": mask_BT.sum(),
        "loss": loss.detach(),
        "clipped": (kept_BT & held_BT).sum(),
        "kept": kept_BT.sum(),
        "bounded": counts.outside_BT.sum(),
        "stale": counts.stale_BT.sum(),
        "behavior_kl": masked(ratio_BT - to_behavior_BT.detach() - 1, mask_BT).sum(),
        "ratio": ratio_BT.sum(),
        "ratio_squared": (ratio_BT**2).sum(),
    }
    if inputs.reference_logprobs_BT is not None:
        d_BT = clamped(masked(inputs.reference_logprobs_BT, mask_BT) - logprobs_BT)
        sums["reference_kl"] = kl_estimate(d_BT.detach(), MEASURE).sum()
        sums["reverse_kl"] = -d_BT.detach().sum()
        if kl.place == "loss":
            kl_BT = kl_estimate(d_BT, kl.estimator_used)
            weighed_kl_BT = kl_BT * to_behavior_BT.exp() if kl.importance_weighted else kl_BT
            loss = loss + kl_coef * (weights_B1 * weighed_kl_BT).sum()
    if entropy_coef:
        assert inputs.entropy_BT is not None
        loss = loss - entropy_coef * (weights_B1 * masked(inputs.entropy_BT, mask_BT)).sum()
    if inputs.length_quarter_B is not None:
        sums |= _by_length(mask_BT, kept_BT, inputs.length_quarter_B)
    return loss, {name: value.float() for name, value in sums.items()}


def token_advantages(inputs: LossInputs, kl: KlConfig, kl_coef: float) -> torch.Tensor:
    """Return the advantages of the rewards, with the KL of each token in them if it belongs there, shape BT.

        A - kl_coef · (log p - log p_reference)        on-policy distillation (Thinking Machines, 2025)

    p is the policy being trained, without a gradient. Weighted by the ratio r, E[r · A · ∇log p] is then the
    gradient of -kl_coef · KL(policy ‖ reference) of each token, whichever policy sampled it.
    """
    mask_BT = inputs.mask_BT.bool() & torch.isfinite(inputs.behavior_logprobs_BT)
    advantages_BT = masked(inputs.advantages_BT.float(), mask_BT)
    if kl.place != "advantage" or inputs.reference_logprobs_BT is None:
        return advantages_BT
    d_BT = clamped(masked(inputs.reference_logprobs_BT, mask_BT) - masked(inputs.logprobs_BT.detach(), mask_BT))
    return advantages_BT + kl_coef * d_BT


def _by_length(mask_BT: torch.Tensor, kept_BT: torch.Tensor, length_quarter_B: torch.Tensor) -> Sums:
    """Count trained and kept tokens by the quarter of max_tokens."""

    def in_quarters(tokens_BT: torch.Tensor) -> torch.Tensor:
        totals = torch.zeros(NUM_LENGTH_QUARTERS, dtype=torch.long, device=tokens_BT.device)
        return totals.index_add(0, length_quarter_B, tokens_BT.sum(dim=1))

    return {"tokens_by_quarter": in_quarters(mask_BT), "kept_by_quarter": in_quarters(kept_BT)}
