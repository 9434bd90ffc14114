"""The KL to the reference: the gradient each estimator has in expectation over a whole vocabulary, and where a policy goes that
nothing but its KL moves. The estimators themselves: test_loss.py.
"""

import itertools
from typing import get_args

import msgspec
import pytest
import torch

from learner.algorithm.kl import kl_estimate
from learner.algorithm.loss import LossInputs, policy_loss
from learner.config import KlConfig, LossConfig, OffPolicyCorrectionConfig
from learner.config.algorithm import KlEstimator

LOGITS_V = torch.tensor([0.3, -1.0, 0.7, 0.0, 1.5, -0.2])
REFERENCE_V = torch.tensor([0.0, 0.5, -0.5, 0.1, 0.9, -1.2]).log_softmax(-1)
BEHAVIOUR_V = torch.tensor([0.8, -0.3, 0.2, -0.6, 0.9, 0.4]).log_softmax(-1)


def expected_gradient(kl: KlConfig, *, on_policy: bool) -> torch.Tensor:
    """Σ_v behaviour(v) · gradient of token v's KL term, of a softmax policy with these logits."""
    logits_V = LOGITS_V.clone().requires_grad_()
    logprobs_V = logits_V.log_softmax(-1)
    sampled_V = logprobs_V.detach() if on_policy else BEHAVIOUR_V
    inputs = LossInputs(
        logprobs_BT=logprobs_V[:, None],
        behaviour_logprobs_BT=sampled_V[:, None],
        staleness_BT=torch.zeros(6, 1, dtype=torch.int64),
        advantages_B=torch.zeros(6),
        weights_B=sampled_V.exp(),
        mask_BT=torch.ones(6, 1, dtype=torch.bool),
        reference_logprobs_BT=REFERENCE_V[:, None],
    )
    loss, _ = policy_loss(inputs, LossConfig(objective="reinforce"), OffPolicyCorrectionConfig(), kl, 1.0)
    return torch.autograd.grad(loss, logits_V)[0]


def true_gradient(*, reverse: bool) -> torch.Tensor:
    """Of KL(policy ‖ reference), or with the two exchanged, added up over the whole vocabulary."""
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


def test_on_policy_k3_has_the_gradient_of_the_kl_the_other_way_round() -> None:
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


V = 4
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=2)))
"""All completions of two tokens, so that every expectation is a sum and nothing is sampled."""
SETTINGS = [
    (estimator, place, is_weighted)
    for estimator in get_args(KlEstimator)
    for place, is_weighted in (("loss", False), ("loss", True), ("reward", False))
]


class Pair:
    """Logits of the first token, and of the second given the first."""

    def __init__(self, seed: int, spread: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = [(torch.randn(shape, generator=generator) * spread).requires_grad_() for shape in ((V,), (V, V))]

    def logprobs_BT(self) -> torch.Tensor:
        first, second = SEQUENCES.T
        one_V, two_VV = (logits.log_softmax(-1) for logits in self.logits)
        return torch.stack([one_V[first], two_VV[first, second]], dim=1)


def kl_after(kl: KlConfig, *, distance: float, num_steps: int = 400, staleness: int = 0) -> tuple[float, float]:
    """Return KL(policy ‖ reference) before and after training on the KL alone: reward 0, gradient descent, exact expectations."""
    reference, policy = Pair(0, 1.0), Pair(0, 1.0)
    moved = Pair(1, distance)
    with torch.no_grad():
        for logits, change in zip(policy.logits, moved.logits, strict=True):
            logits.add_(change)
    reference_BT = reference.logprobs_BT().detach()
    behaviours, kls = [], []
    for _ in range(num_steps):
        logprobs_BT = policy.logprobs_BT()
        now_BT = logprobs_BT.detach()
        behaviours.append(now_BT)
        kls.append(float((now_BT.sum(1).exp() * (now_BT - reference_BT).sum(1)).sum()))
        behaviour_BT = behaviours[max(0, len(behaviours) - 1 - staleness)]
        chance_B = behaviour_BT.sum(1).exp()
        advantages_B = torch.zeros(len(SEQUENCES))
        if kl.place == "reward":
            penalty_B = kl_estimate(reference_BT - now_BT, kl.estimator_used).sum(1)
            advantages_B = (chance_B * penalty_B).sum() - penalty_B
        inputs = LossInputs(
            logprobs_BT=logprobs_BT,
            behaviour_logprobs_BT=behaviour_BT,
            staleness_BT=torch.full(SEQUENCES.shape, staleness),
            advantages_B=advantages_B,
            weights_B=chance_B,
            mask_BT=torch.ones(SEQUENCES.shape, dtype=torch.bool),
            reference_logprobs_BT=reference_BT,
        )
        loss, _ = policy_loss(inputs, LossConfig(), OffPolicyCorrectionConfig(), kl, kl.coef)
        for logits, gradient in zip(policy.logits, torch.autograd.grad(loss, policy.logits), strict=True):
            logits.data -= 0.5 * gradient
    return kls[0], kls[-1]


def accepted(estimator: str, place: str, is_weighted: bool) -> KlConfig | None:
    try:
        return KlConfig(coef=1.0, estimator=estimator, place=place, importance_weighted=is_weighted)
    except ValueError:
        return None


def without_checks(*, estimator: str, place: str) -> KlConfig:
    kl = KlConfig(coef=1.0)
    for key, value in {"estimator": estimator, "place": place}.items():
        msgspec.structs.force_setattr(kl, key, value)
    return kl


@pytest.mark.parametrize("setting", [one for one in SETTINGS if accepted(*one)], ids=str)
def test_a_policy_that_only_its_kl_moves_returns_to_the_reference(setting: tuple[str, str, bool]) -> None:
    kl = accepted(*setting)
    assert kl is not None
    before, after = kl_after(kl, distance=1.5, staleness=4)
    assert before > 0.005 and after < 0.01 * before


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_grad_k2"])
def test_what_is_refused_in_the_reward_would_push_the_policy_away(estimator: str) -> None:
    assert accepted(estimator, "reward", False) is None
    before, after = kl_after(without_checks(estimator=estimator, place="reward"), distance=0.2)
    assert after > 1.5 * before


def test_k1_without_a_weight_in_the_loss_would_move_nothing() -> None:
    assert accepted("k1", "loss", False) is None
    before, after = kl_after(without_checks(estimator="k1", place="loss"), distance=0.2)
    assert after == pytest.approx(before, rel=1e-3)
