"""Every objective against an independent one: token by token, in 50-digit arithmetic, written from the papers."""

import math
import random

import mpmath
import pytest
import torch

from learner.config import LossConfig
from learner.loss import policy_loss
from learner.normalization import row_weight

B, T, MAX_TOKENS = 6, 9, 12
NUM_TOKENS = 31  # of the whole step: more than this micro-batch holds
NUM_ROWS = 8
H = mpmath.mpf(10) ** -20

CONFIGS = [
    LossConfig(),
    LossConfig(kl_coef=0.3),
    LossConfig(kl_coef=0.3, kl_estimator="k1"),
    LossConfig(kl_coef=0.3, kl_estimator="k2", normalization="dr_grpo"),
    LossConfig(kl_coef=0.3, kl_estimator="k3_grad_k2"),
    LossConfig(clip_low=0.1, clip_high=0.5, dual_clip=3.0, normalization="sequence"),
    LossConfig(objective="gspo", normalization="sequence"),
    LossConfig(objective="gspo", clip_low=0.2, clip_high=0.3, dual_clip=2.0),
    LossConfig(objective="cispo", clip_high=1.0, kl_coef=0.1),
    LossConfig(objective="cispo", normalization="dr_grpo"),
    LossConfig(objective="sapo", normalization="sequence"),
    LossConfig(objective="sapo", tau_positive=2.0, tau_negative=0.5, normalization="dr_grpo"),
    LossConfig(objective="dppo", kl_coef=0.2),
    LossConfig(objective="dppo", tv_low=0.01, tv_high=0.02, log_ratio_penalty=0.5, normalization="dr_grpo"),
    LossConfig(objective="reinforce", normalization="sequence"),
]


def name_of(config: LossConfig) -> str:
    kl = f"{config.kl_coef}{config.kl_estimator}" if config.kl_coef else "no"
    return f"{config.objective}-{config.normalization}-{kl}-dual{config.dual_clip}"


def clamp(value, low, high):
    return max(low, min(high, value))


def token_losses(config: LossConfig, advantage, tokens):
    """The objective of each token of one completion. A token is (logprob, the same without gradient, behaviour)."""
    log_ratios = [clamp(p - b, -20, 20) for p, _, b in tokens]
    ratios = [mpmath.exp(x) for x in log_ratios]

    def clipped(ratio, low, high):
        objective = min(ratio * advantage, clamp(ratio, 1 - low, 1 + high) * advantage)
        return -max(objective, config.dual_clip * advantage) if config.dual_clip and advantage < 0 else -objective

    match config.objective:
        case "grpo":
            low, high = config.clip_low or 0.2, config.clip_high or 0.28
            return [clipped(ratio, low, high) for ratio in ratios]
        case "gspo":
            sequence_ratio = mpmath.exp(sum(log_ratios) / len(tokens))
            return [clipped(sequence_ratio, config.clip_low or 3e-4, config.clip_high or 4e-4) for _ in tokens]
        case "cispo":
            frozen = [mpmath.exp(clamp(f - b, -20, 20)) for _, f, b in tokens]
            bound = 1 + (config.clip_high or 4.0)
            return [-min(r, bound) * advantage * p for r, (p, _, _) in zip(frozen, tokens, strict=True)]
        case "sapo":
            tau = (config.tau_positive or 1.0) if advantage > 0 else (config.tau_negative or 1.05)
            return [-4 / mpmath.mpf(tau) / (1 + mpmath.exp(-tau * (ratio - 1))) * advantage for ratio in ratios]
        case "dppo":
            losses = []
            for (_, f, b), x, ratio in zip(tokens, log_ratios, ratios, strict=True):
                moved = mpmath.exp(f) - mpmath.exp(f - clamp(f - b, -20, 20))
                up = advantage > 0 and moved > (config.tv_high or 0.2)
                down = advantage < 0 and moved < -(config.tv_low or 0.2)
                penalty = (config.log_ratio_penalty or 1e-3) * x**2
                losses.append(penalty if up or down else penalty - ratio * advantage)
            return losses
        case "reinforce":
            return [-advantage * p for p, _, _ in tokens]


def kl(estimator: str, reference, logprob, frozen_logprob):
    """Schulman's estimators; the straight-through one has the value of k3 and moves as k2 does."""
    d, frozen = clamp(reference - logprob, -20, 20), clamp(reference - frozen_logprob, -20, 20)
    k1, k2, k3 = -d, d**2 / 2, mpmath.exp(d) - d - 1
    straight_through = mpmath.exp(frozen) - frozen - 1 + k2 - frozen**2 / 2
    return {"k1": k1, "k2": k2, "k3": k3, "k3_grad_k2": straight_through}[estimator]


def completion_loss(config: LossConfig, advantage, tokens, weight):
    """One completion's share of the loss. A token is (logprob, without gradient, behaviour, reference)."""
    kept = [token for token in tokens if math.isfinite(token[2])]
    if not kept:
        return mpmath.mpf(0)
    losses = token_losses(config, advantage, [token[:3] for token in kept])
    for i, (p, frozen, _, reference) in enumerate(kept):
        losses[i] += config.kl_coef * kl(config.kl_estimator, reference, p, frozen)
    return weight * sum(losses)


def weight_of(config: LossConfig, num_tokens: int) -> float:
    return {
        "token": 1 / NUM_TOKENS,
        "sequence": 1 / NUM_ROWS / max(num_tokens, 1),
        "dr_grpo": 1 / NUM_ROWS / MAX_TOKENS,
    }[config.normalization]


def random_case(seed: int, garbage: float):
    """Ragged rows as lists and the same as padded tensors, with garbage in every place that is masked out."""
    generator = random.Random(seed)
    rows = []
    tensors = {
        name: torch.full((B, T), garbage, dtype=torch.float32) for name in ("logprobs", "behaviour", "reference")
    }
    mask_BT = torch.zeros(B, T, dtype=torch.bool)
    for b in range(B):
        start = generator.randrange(0, T - 1)
        end = generator.choice([start, start + 1, generator.randrange(start, T) + 1])
        tokens = []
        for t in range(start, end):
            logprob = generator.uniform(-5, 0)
            behaviour = logprob + generator.choice([0.0, 0.1, -0.1, 0.5, -0.5, 30.0, -30.0, math.inf, math.nan])
            values = (logprob, behaviour, logprob + generator.uniform(-0.5, 0.5))
            for name, value in zip(tensors, values, strict=True):
                tensors[name][b, t] = value
            logprob, behaviour, reference = (float(tensors[name][b, t]) for name in tensors)
            tokens.append((logprob, logprob, behaviour, reference))
            mask_BT[b, t] = True
        rows.append((float(torch.tensor(generator.uniform(-2, 2))), tokens))
    return rows, tensors, mask_BT


def loss_of(rows, tensors, mask_BT, config: LossConfig):
    weights = [
        row_weight(
            config.normalization,
            row_tokens=len(tokens),
            num_tokens=NUM_TOKENS,
            num_rows=NUM_ROWS,
            max_tokens=MAX_TOKENS,
        )
        for _, tokens in rows
    ]
    return policy_loss(
        logprobs_BT=tensors["logprobs"],
        behaviour_logprobs_BT=tensors["behaviour"],
        advantages_B=torch.tensor([advantage for advantage, _ in rows]),
        weights_B=torch.tensor(weights),
        mask_BT=mask_BT,
        reference_logprobs_BT=tensors["reference"] if config.kl_coef else None,
        config=config,
    )


@pytest.fixture(autouse=True)
def fifty_digits():
    with mpmath.workdps(50):
        yield


@pytest.mark.parametrize("garbage", [0.0, math.nan, 1e4, -1e4, math.inf])
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_loss_equals_the_papers_whatever_stands_in_the_padding(config: LossConfig, garbage: float) -> None:
    for seed in range(4):
        rows, tensors, mask_BT = random_case(seed, garbage)
        loss, sums = loss_of(rows, tensors, mask_BT, config)
        expected = sum(completion_loss(config, a, tokens, weight_of(config, len(tokens))) for a, tokens in rows)
        assert loss.item() == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
        assert sums["tokens"] == sum(math.isfinite(token[2]) for _, tokens in rows for token in tokens)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_gradient_equals_the_derivative_of_the_papers_and_is_finite(config: LossConfig) -> None:
    for seed in range(4):
        rows, tensors, mask_BT = random_case(seed, math.nan)
        tensors["logprobs"].requires_grad_()
        loss_of(rows, tensors, mask_BT, config)[0].backward()
        gradient_BT = tensors["logprobs"].grad
        assert torch.isfinite(gradient_BT).all() and (gradient_BT[~mask_BT] == 0).all()
        for b, t in mask_BT.nonzero().tolist():
            advantage, tokens = rows[b]
            i = t - int(mask_BT[b].nonzero()[0])

            def at(shift, advantage=advantage, tokens=tokens, i=i):
                p, *rest = tokens[i]
                shifted = [*tokens[:i], (p + shift, *rest), *tokens[i + 1 :]]
                return completion_loss(config, advantage, shifted, weight_of(config, len(tokens)))

            expected = float((at(H) - at(-H)) / (2 * H))
            assert gradient_BT[b, t].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_micro_batches_add_up_to_the_whole_batch(config: LossConfig) -> None:
    rows, tensors, mask_BT = random_case(1, 0.0)
    whole, _ = loss_of(rows, tensors, mask_BT, config)
    parts = [
        loss_of(rows[part], {name: value[part] for name, value in tensors.items()}, mask_BT[part], config)[0]
        for part in (slice(0, 2), slice(2, 3), slice(3, B))
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_batch_that_is_masked_out_has_loss_zero_and_zero_gradients(config: LossConfig) -> None:
    rows, tensors, mask_BT = random_case(0, math.nan)
    tensors = {name: torch.full((B, T), math.nan) for name in tensors}
    tensors["logprobs"].requires_grad_()
    loss, sums = loss_of(rows, tensors, torch.zeros_like(mask_BT), config)
    loss.backward()
    assert loss == 0 and sums["tokens"] == 0 and (tensors["logprobs"].grad == 0).all()


@pytest.mark.parametrize(
    ("config", "advantage", "ratios", "held"),
    [
        (LossConfig(), 1.0, [1.5, 1.2, 0.5], [True, False, False]),
        (LossConfig(), -1.0, [1.5, 0.9, 0.5], [False, False, True]),
        (LossConfig(dual_clip=3.0), -1.0, [4.0, 2.0, 0.5], [True, False, True]),
        (LossConfig(objective="cispo", clip_high=1.0), -1.0, [2.5, 1.5, 0.1], [True, False, False]),
        (LossConfig(objective="dppo"), 1.0, [4.0, 1.01, 0.1], [True, False, False]),
        (LossConfig(objective="reinforce"), 1.0, [9.0, 1.0, 0.1], [False, False, False]),
    ],
)
def test_only_bounds_that_bind_are_counted(
    config: LossConfig, advantage: float, ratios: list[float], held: list[bool]
) -> None:
    behaviour_BT = torch.full((1, 3), math.log(0.2))
    _, sums = policy_loss(
        logprobs_BT=behaviour_BT + torch.tensor(ratios).log(),
        behaviour_logprobs_BT=behaviour_BT,
        advantages_B=torch.tensor([advantage]),
        weights_B=torch.ones(1),
        mask_BT=torch.ones(1, 3, dtype=torch.bool),
        reference_logprobs_BT=None,
        config=config,
    )
    assert sums["clipped"] == sum(held)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"objective": "reinforce", "clip_low": 0.2}, r'clip_low = 0\.2 does nothing with objective = "reinforce"'),
        ({"tau_positive": 1.0}, r'tau_positive = 1\.0 does nothing with objective = "grpo".*clip_low'),
        ({"clip_low": 0.3}, r"clip_high = 0\.28 must not be below clip_low = 0\.3"),
        ({"dual_clip": 1.1}, r"dual_clip = 1\.1 must be above 1 \+ clip_high"),
        ({"objective": "sapo", "tau_negative": 0.0}, "tau_negative must be above 0"),
        ({"kl_estimator": "k1"}, r'kl_estimator = "k1" does nothing with kl_coef = 0'),
        ({"kl_coef": -1.0}, r"kl_coef = -1\.0 must not be negative"),
    ],
)
def test_bounds_that_do_nothing_or_contradict_are_refused(settings: dict, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        LossConfig(**settings)
