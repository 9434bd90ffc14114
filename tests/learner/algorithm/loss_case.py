"""A random micro-batch in two forms: completions for the oracle, and padded tensors for the code.

All logprobs are multiples of 2⁻¹⁰, advantages of 2⁻³, and staleness is 2ⁿ - 1. Differences, sums and log-linear anchors
are then exact in float32; oracle and code differ only in the rounding of exp, products and sums. Legend: B completions,
T positions.
"""

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from learner.algorithm.loss import LossInputs, policy_loss
from learner.algorithm.objectives import PICKS
from tests.learner.algorithm.oracle import Completion, Rule, Token

MAX_TOKENS = 12
NUM_TOKENS, NUM_ROWS = 31, 8  # of the whole step, which is larger than a micro-batch
LENGTHS = (0, 1, 1, 2, 3, 5)
ADVANTAGES = (0.0, 1.0, -1.0, 1.5, -0.375, -2.0)
WILD = (0.0, 30.0, -30.0, 12.0, -12.0, math.inf, -math.inf, math.nan)


class Case(NamedTuple):
    rule: Rule
    completions: Sequence[Completion]
    positions: Sequence[Sequence[int]]
    """Positions of each completion's tokens in its row. All other positions are padding."""


def on_grid(rng: random.Random, low: float, high: float) -> float:
    return rng.randint(round(low * 1024), round(high * 1024)) / 1024


def make_token(rng: random.Random, rule: Rule, *, is_wild: bool, has_proximal: bool) -> Token:
    logprob = on_grid(rng, -5, 0)
    apart = on_grid(rng, -1, 1)
    drift = rng.choice(WILD) + apart if is_wild else rng.choice((0.0, 0.1, 1.0)) * apart
    drift = round(drift * 1024) / 1024 if math.isfinite(drift) else drift
    needs_reference = rule.kl.is_on
    return Token(
        logprob=logprob,
        behavior=logprob + drift,
        staleness=rng.choice((0, 1, 3)),
        proximal=logprob + on_grid(rng, -1, 1) + (rng.choice(WILD[:3]) if is_wild else 0) if has_proximal else None,
        reference=logprob + on_grid(rng, -1, 1) + (rng.choice(WILD[:3]) if is_wild else 0) if needs_reference else None,
        entropy=on_grid(rng, 0, 3),
        carries_policy=rule.loss.top_entropy_frac == 1 or rng.random() < 0.5,
        picked=rule.loss.objective in PICKS and rng.random() < 0.5,
    )


def weight_of(normalization: str, num_tokens: int) -> float:
    """Return the weight of DAPO, GRPO, LUSPO or Dr. GRPO, in float32 as in the code."""
    counts = {
        "token": NUM_TOKENS,
        "sequence": NUM_ROWS * max(num_tokens, 1),
        "sequence_sum": NUM_ROWS,
        "dr_grpo": NUM_ROWS * MAX_TOKENS,
    }
    return float(torch.tensor(1 / counts[normalization]))


def make_case(seed: str, rule: Rule, *, is_wild: bool = False, has_proximal: bool = False, width: int = 9) -> Case:
    """Return six completions, one empty and two with one token. Wild: ratios up to e³⁰ and NaN behavior logprobs."""
    rng = random.Random(seed)
    completions, positions = [], []
    lengths, advantages = (rng.sample(values, len(values)) for values in (LENGTHS, ADVANTAGES))
    for num_tokens, advantage in zip(lengths, advantages, strict=True):
        tokens = tuple(make_token(rng, rule, is_wild=is_wild, has_proximal=has_proximal) for _ in range(num_tokens))
        completions.append(Completion(advantage, weight_of(rule.loss.mean_over, num_tokens), tokens))
        positions.append(sorted(rng.sample(range(width), num_tokens)))
    return Case(rule, completions, positions)


def tensors_of(case: Case, *, width: int = 9, garbage: float = 0.0) -> LossInputs:
    """Return the loss inputs, with `garbage` at every masked position. Logprobs and entropies require gradients."""
    shape = (len(case.completions), width)
    mask_BT = torch.zeros(shape, dtype=torch.bool)

    def filled(name: str, padding: float, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        values_BT = torch.full(shape, padding, dtype=dtype)
        for b, (completion, places) in enumerate(zip(case.completions, case.positions, strict=True)):
            for token, t in zip(completion.tokens, places, strict=True):
                mask_BT[b, t] = True
                if getattr(token, name) is None:
                    return None
                values_BT[b, t] = getattr(token, name)
        return values_BT

    loss = case.rule.loss
    return LossInputs(
        logprobs_BT=filled("logprob", garbage).requires_grad_(),
        behavior_logprobs_BT=filled("behavior", garbage),
        staleness_BT=filled("staleness", -1 if garbage else 0, torch.int64),  # -1: s + 1 would divide by zero
        advantages_BT=torch.where(
            mask_BT, torch.tensor([[completion.advantage] for completion in case.completions]), garbage
        ),
        weights_B=torch.tensor([completion.weight for completion in case.completions]),
        mask_BT=mask_BT,
        proximal_logprobs_BT=filled("proximal", garbage),
        reference_logprobs_BT=filled("reference", garbage),
        entropy_BT=filled("entropy", garbage).requires_grad_() if loss.entropy_coef else None,
        policy_mask_BT=filled("carries_policy", garbage != 0, torch.bool) if loss.top_entropy_frac < 1 else None,
        picked_BT=filled("picked", garbage != 0, torch.bool) if loss.objective in PICKS else None,
    )


class Result(NamedTuple):
    loss: float
    gradients: list[list[float]]
    """Gradients by completion and token. Those of padding are checked to be 0."""
    entropy_gradients: list[list[float]] | None
    sums: dict[str, float]


def run(case: Case, *, width: int = 9, garbage: float = 0.0) -> Result:
    """Return loss and gradients of the code. Fails unless gradients are finite, and exactly 0 in padding."""
    inputs, rule = tensors_of(case, width=width, garbage=garbage), case.rule
    loss, sums = policy_loss(
        inputs, rule.loss, rule.off_policy_correction, rule.kl, rule.kl_coef, rule.loss.entropy_coef
    )
    loss.backward()

    def by_token(values_BT: torch.Tensor) -> list[list[float]]:
        assert torch.isfinite(values_BT).all(), values_BT
        assert (values_BT[~inputs.mask_BT] == 0).all(), values_BT
        return [values_T[list(places)].tolist() for values_T, places in zip(values_BT, case.positions, strict=True)]

    assert all(value.dtype == torch.float32 and value.dim() == 0 for value in sums.values()), sums
    return Result(
        loss=loss.item(),
        gradients=by_token(inputs.logprobs_BT.grad),
        entropy_gradients=by_token(inputs.entropy_BT.grad) if inputs.entropy_BT is not None else None,
        sums={name: value.item() for name, value in sums.items()},
    )
