"""The expected gradient of each KL estimator over a whole vocabulary. Values of the estimators: test_loss.py."""

import math

import pytest
import torch

from learner.algorithm.kl import kl_estimate
from learner.algorithm.loss import LossInputs, policy_loss, token_advantages
from learner.config import KlConfig, LossConfig, OffPolicyCorrectionConfig

LOGITS_V = torch.tensor([0.3, -1.0, 0.7, 0.0, 1.5, -0.2])
REFERENCE_V = torch.tensor([0.0, 0.5, -0.5, 0.1, 0.9, -1.2]).log_softmax(-1)
BEHAVIOR_V = torch.tensor([0.8, -0.3, 0.2, -0.6, 0.9, 0.4]).log_softmax(-1)


def expected_gradient(
    kl: KlConfig,
    *,
    on_policy: bool,
    loss_config: LossConfig = LossConfig(objective="reinforce"),  # noqa: B008  (frozen)
) -> torch.Tensor:
    """Return Σ_v behavior(v) · gradient of token v's KL term or penalty, for a softmax policy."""
    logits_V = LOGITS_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(-1)
    sampled_V = logprobs_V.detach() if on_policy else BEHAVIOR_V
    advantages_V = torch.zeros(6)
    if kl.place == "reward":
        penalty_V = kl_estimate(REFERENCE_V - logprobs_V.detach(), kl.estimator_used)
        advantages_V = (sampled_V.exp() * penalty_V).sum() - penalty_V
    inputs = LossInputs(
        logprobs_BT=logprobs_V[:, None],
        behavior_logprobs_BT=sampled_V[:, None],
        staleness_BT=torch.zeros(6, 1, dtype=torch.int64),
        advantages_BT=advantages_V[:, None],
        weights_B=sampled_V.exp(),
        mask_BT=torch.ones(6, 1, dtype=torch.bool),
        reference_logprobs_BT=REFERENCE_V[:, None],
    )
    loss, _ = policy_loss(inputs, loss_config, OffPolicyCorrectionConfig(), kl, 1.0, 0.0)
    return torch.autograd.grad(loss, logits_V)[0]


def true_gradient(*, reverse: bool) -> torch.Tensor:
    """Return the gradient of KL(policy ‖ reference), or of the reverse KL, summed over the vocabulary."""
    logits_V = LOGITS_V.clone().requires_grad_()
    policy_V = logits_V.log_softmax(-1)
    above_V, below_V = (policy_V, REFERENCE_V) if reverse else (REFERENCE_V, policy_V)
    (above_V.exp() * (above_V - below_V)).sum().backward()
    return logits_V.grad


def same(found_V: torch.Tensor, expected_V: torch.Tensor) -> bool:
    return torch.allclose(found_V, expected_V, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3_grad_k2"])
def test_on_policy_k2_has_the_gradient_of_the_kl(estimator: str) -> None:
    found_V = expected_gradient(KlConfig(coef=1.0, estimator=estimator), on_policy=True)
    assert same(found_V, true_gradient(reverse=True)) and not same(found_V, true_gradient(reverse=False))


def test_on_policy_k3_has_the_gradient_of_the_reverse_kl() -> None:
    found_V = expected_gradient(KlConfig(coef=1.0), on_policy=True)
    assert same(found_V, true_gradient(reverse=False)) and not same(found_V, true_gradient(reverse=True))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_importance_weighted_k1_and_k3_have_the_gradient_of_the_kl_off_policy_too(estimator: str) -> None:
    for on_policy in (True, False):
        found_V = expected_gradient(
            KlConfig(coef=1.0, estimator=estimator, importance_weighted=True), on_policy=on_policy
        )
        assert same(found_V, true_gradient(reverse=True))
    assert not same(expected_gradient(KlConfig(coef=1.0), on_policy=False), true_gradient(reverse=True))


def test_in_the_reward_k1_has_the_gradient_of_the_kl() -> None:
    k1 = expected_gradient(KlConfig(coef=1.0, place="reward"), on_policy=True)
    assert same(k1, true_gradient(reverse=True))


def test_in_the_advantage_the_kl_of_each_token_has_the_gradient_of_the_kl_off_policy_too() -> None:
    kl = KlConfig(coef=1.0, place="advantage")
    assert same(expected_gradient(kl, on_policy=True), true_gradient(reverse=True))
    unclipped = LossConfig(objective="grpo", clip_low=0.99, clip_high=99.0, dual_clip=math.inf)
    for loss_config in (unclipped, LossConfig(objective="cispo", clip_high=99.0)):
        found_V = expected_gradient(kl, on_policy=False, loss_config=loss_config)
        assert same(found_V, true_gradient(reverse=True))


def test_the_kl_in_the_advantage_adds_to_the_advantage_of_the_rewards_of_trained_tokens_alone() -> None:
    inputs = LossInputs(
        logprobs_BT=torch.tensor([[-1.0, -2.0, math.nan]]),
        behavior_logprobs_BT=torch.tensor([[-1.5, -2.5, math.nan]]),
        staleness_BT=torch.zeros(1, 3, dtype=torch.int64),
        advantages_BT=torch.full((1, 3), 0.5),
        weights_B=torch.ones(1),
        mask_BT=torch.tensor([[True, True, False]]),
        reference_logprobs_BT=torch.tensor([[-0.25, -4.0, math.nan]]),
    )
    advantages_BT = token_advantages(inputs, KlConfig(coef=2.0, place="advantage"), 2.0)
    assert advantages_BT.tolist() == [[0.5 + 2 * 0.75, 0.5 - 2 * 2.0, 0.0]]
