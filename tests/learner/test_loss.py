"""The loss against an independent implementation: per token, in Python floats, written from the papers."""

import math
import random

import pytest
import torch

from learner.config import LossConfig
from learner.loss import grpo_loss

B, T = 6, 9


def per_token_loss(rows, config: LossConfig, num_tokens: int) -> float:
    """PPO's clipped surrogate (arXiv 1707.06347 eq. 7) and Schulman's k3, one token at a time, in float64."""
    total = 0.0
    for advantage, tokens in rows:
        for logprob, behaviour, reference in tokens:
            if not math.isfinite(behaviour):
                continue
            ratio = math.exp(max(-20.0, min(20.0, logprob - behaviour)))
            clipped = max(1 - config.clip_low, min(1 + config.clip_high, ratio))
            total -= min(ratio * advantage, clipped * advantage)
            if config.kl_coef:
                d = max(-20.0, min(20.0, reference - logprob))
                total += config.kl_coef * (math.exp(d) - d - 1)
    return total / num_tokens


def per_token_gradient(advantage: float, token, config: LossConfig, num_tokens: int) -> float:
    """The derivative of the above with respect to the token's logprob, worked out by hand."""
    logprob, behaviour, reference = token
    if not math.isfinite(behaviour):
        return 0.0
    log_ratio = logprob - behaviour
    ratio = math.exp(max(-20.0, min(20.0, log_ratio)))
    stopped_by_clip = ratio > 1 + config.clip_high if advantage > 0 else ratio < 1 - config.clip_low
    gradient = 0.0 if stopped_by_clip or abs(log_ratio) > 20 else -advantage * ratio
    if config.kl_coef:
        gradient += config.kl_coef * (1 - math.exp(reference - logprob))
    return gradient / num_tokens


def random_case(seed: int, garbage: float):
    """Ragged rows as Python lists and the same as padded tensors, with garbage in every place that is masked out."""
    generator = random.Random(seed)
    rows = []
    tensors = {name: torch.full((B, T), garbage) for name in ("logprobs", "behaviour", "reference")}
    mask_BT = torch.zeros(B, T, dtype=torch.bool)
    advantages_B = torch.zeros(B)
    for b in range(B):
        start = generator.randrange(0, T - 1)
        end = generator.choice([start, start + 1, generator.randrange(start, T) + 1])
        advantages_B[b] = round(generator.uniform(-2, 2), 3)
        tokens = []
        for t in range(start, end):
            logprob = generator.uniform(-5, 0)
            behaviour = logprob + generator.choice([0.0, 0.1, -0.1, 0.5, -0.5, 30.0, -30.0, math.inf, math.nan])
            token = (logprob, behaviour, logprob + generator.uniform(-0.5, 0.5))
            tokens.append(token)
            for name, value in zip(tensors, token, strict=True):
                tensors[name][b, t] = value
            mask_BT[b, t] = True
        rows.append((float(advantages_B[b]), tokens))
    return rows, tensors, mask_BT, advantages_B


def loss_of(tensors, mask_BT, advantages_B, config: LossConfig, num_tokens: int):
    return grpo_loss(
        logprobs_BT=tensors["logprobs"],
        behaviour_logprobs_BT=tensors["behaviour"],
        advantages_B=advantages_B,
        mask_BT=mask_BT,
        reference_logprobs_BT=tensors["reference"] if config.kl_coef else None,
        num_tokens=num_tokens,
        config=config,
    )


@pytest.mark.parametrize("garbage", [0.0, math.nan, 1e4, -1e4, math.inf])
@pytest.mark.parametrize("config", [LossConfig(), LossConfig(clip_low=0.1, clip_high=0.1), LossConfig(kl_coef=0.3)])
@pytest.mark.parametrize("seed", range(5))
def test_loss_equals_the_papers_token_by_token_whatever_stands_in_the_padding(
    seed: int, config: LossConfig, garbage: float
) -> None:
    rows, tensors, mask_BT, advantages_B = random_case(seed, garbage)
    loss, sums = loss_of(tensors, mask_BT, advantages_B, config, num_tokens=20)
    assert loss.item() == pytest.approx(per_token_loss(rows, config, 20), rel=1e-5, abs=1e-6)
    assert sums["tokens"] == sum(math.isfinite(behaviour) for _, tokens in rows for _, behaviour, _ in tokens)


@pytest.mark.parametrize("config", [LossConfig(), LossConfig(kl_coef=0.3)])
@pytest.mark.parametrize("seed", range(5))
def test_gradient_equals_the_one_worked_out_by_hand_and_is_finite(seed: int, config: LossConfig) -> None:
    rows, tensors, mask_BT, advantages_B = random_case(seed, math.nan)
    tensors["logprobs"] = tensors["logprobs"].double().requires_grad_()
    loss, _ = loss_of(tensors, mask_BT, advantages_B, config, num_tokens=20)
    loss.backward()
    gradient_BT = tensors["logprobs"].grad
    assert torch.isfinite(gradient_BT[mask_BT]).all() and (gradient_BT[~mask_BT] == 0).all()
    for b, t in mask_BT.nonzero().tolist():
        advantage, tokens = rows[b]
        first = int(mask_BT[b].nonzero()[0])
        expected = per_token_gradient(advantage, tokens[t - first], config, 20)
        assert gradient_BT[b, t].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    _, tensors, mask_BT, advantages_B = random_case(1, 0.0)
    config = LossConfig(kl_coef=0.1)
    whole, _ = loss_of(tensors, mask_BT, advantages_B, config, num_tokens=20)
    parts = [
        loss_of({n: v[rows] for n, v in tensors.items()}, mask_BT[rows], advantages_B[rows], config, num_tokens=20)[0]
        for rows in (slice(0, 2), slice(2, 3), slice(3, B))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), abs=1e-6)


def test_clipped_counts_only_clips_that_bind() -> None:
    behaviour_BT = torch.zeros(1, 4)
    logprobs_BT = torch.log(torch.tensor([[1.5, 1.5, 0.5, 0.5]]))
    for advantage, expected in ((1.0, 2), (-1.0, 2)):
        _, sums = grpo_loss(
            logprobs_BT=logprobs_BT, behaviour_logprobs_BT=behaviour_BT, advantages_B=torch.tensor([advantage]),
            mask_BT=torch.ones(1, 4, dtype=torch.bool), reference_logprobs_BT=None, num_tokens=4, config=LossConfig(),
        )  # fmt: skip
        assert sums["clipped"] == expected


def test_a_batch_that_is_masked_out_has_loss_zero_and_zero_gradients() -> None:
    logprobs_BT = torch.full((2, 3), math.nan, requires_grad=True)
    loss, sums = grpo_loss(
        logprobs_BT=logprobs_BT, behaviour_logprobs_BT=torch.full((2, 3), math.nan), advantages_B=torch.ones(2),
        mask_BT=torch.zeros(2, 3, dtype=torch.bool), reference_logprobs_BT=None, num_tokens=5, config=LossConfig(),
    )  # fmt: skip
    loss.backward()
    assert loss == 0 and sums["tokens"] == 0 and (logprobs_BT.grad == 0).all()
