"""Every objective × correction compared with the oracle: loss, gradient and reported sums.

Tolerance: 1e-6, relative to the largest summand if that is above 1. The code computes in float32, with a rounding error
of 6e-8; the cases (loss_case.py) are exact in float32.
"""

import math

import mpmath
import msgspec
import pytest
import torch

from learner.algorithm.loss import LossInputs, policy_loss
from learner.algorithm.objectives import OBJECTIVES
from learner.config import KlConfig, LossConfig, OffPolicyCorrectionConfig
from learner.training.batch import row_weight
from tests.learner.algorithm import oracle
from tests.learner.algorithm.loss_case import (
    MAX_TOKENS,
    NUM_ROWS,
    NUM_TOKENS,
    Case,
    Result,
    make_case,
    run,
    tensors_of,
    weight_of,
)
from tests.learner.algorithm.loss_rules import BOUNDS, NORMALIZATIONS, RULES
from tests.learner.algorithm.oracle import Completion, Rule, Token


@pytest.fixture(autouse=True)
def many_digits():
    with mpmath.workdps(oracle.DIGITS):
        yield


def close(value: float, expected: float, scale: float = 0.0) -> bool:
    return abs(value - expected) <= 1e-6 * max(1.0, abs(expected), scale)


def check_against_the_oracle(case: Case, found: Result) -> None:
    rule, completions = case.rule, case.completions
    shares = [oracle.terms(rule, completion) for completion in completions]
    scales = [scales_of(rule, *each) for each in zip(completions, shares, strict=True)]
    total = sum(map(sum, scales))
    assert close(found.loss, float(sum(map(sum, shares))), total)
    for completion, scales_T, gradients_T in zip(completions, scales, found.gradients, strict=True):
        expected = map(float, oracle.gradient(rule, completion))
        inside = iter(scales_T)
        for token, value, derivative in zip(completion.tokens, gradients_T, expected, strict=True):
            assert close(value, derivative, next(inside) if math.isfinite(token.behavior) else 0.0), completion
    for name, wanted in oracle.sums(rule, completions).items():
        assert close(found.sums[name], wanted, total), (name, found.sums[name], wanted)


def scales_of(rule: Rule, completion: Completion, shares: list) -> list[float]:
    """Return the largest summand of each token's share: a KL near 0 may have a weight of e²⁰."""
    ratios = [mpmath.exp(oracle.log_ratio(token.logprob, token.behavior)) for token in completion.finite]
    unit = completion.weight * rule.kl_coef if rule.kl.importance_weighted else 0.0
    return [float(max(abs(share), unit * ratio)) for share, ratio in zip(shares, ratios, strict=True)]


@pytest.mark.parametrize("name", RULES)
def test_loss_gradient_and_sums_equal_the_papers(name: str) -> None:
    rule, has_proximal = RULES[name]
    for is_wild in (False, True):
        case = make_case(name, rule, is_wild=is_wild, has_proximal=has_proximal)
        check_against_the_oracle(case, run(case, garbage=math.nan))


@pytest.mark.parametrize("name", list(RULES)[::13])
def test_entropy_includes_every_token_also_rejected_ones(name: str) -> None:
    rule, has_proximal = RULES[name]
    rule = rule._replace(loss=msgspec.structs.replace(rule.loss, entropy_coef=0.25))
    case = make_case(name, rule, is_wild=True, has_proximal=has_proximal)
    for completion, gradients_T in zip(case.completions, run(case, garbage=math.nan).entropy_gradients, strict=True):
        expected = [-0.25 * completion.weight * math.isfinite(token.behavior) for token in completion.tokens]
        assert gradients_T == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("name", list(RULES)[::13])
def test_a_micro_batch_without_tokens_has_loss_gradient_and_sums_of_exactly_zero(name: str) -> None:
    rule, has_proximal = RULES[name]
    case = make_case(name, rule, has_proximal=has_proximal)
    inputs = tensors_of(case, garbage=math.nan)
    inputs = msgspec.structs.replace(inputs, mask_BT=torch.zeros_like(inputs.mask_BT))
    loss, sums = policy_loss(inputs, rule.loss, rule.off_policy_correction, rule.kl, rule.kl_coef, 0.0)
    loss.backward()
    assert loss == 0 and (inputs.logprobs_BT.grad == 0).all()
    assert all(sums[name] == 0 for name in oracle.sums(rule, []))


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ({}, [1.0, 1.0, 1.0]),
        ({"weight": "truncate"}, [0.5, 1.5, 2.0]),
        ({"weight": "truncate", "max_weight": 1.25}, [0.5, 1.25, 1.25]),
        ({"weight": "mask"}, [0.5, 1.5, 0.0]),
        ({"weight": "mask", "max_weight": 8.0, "min_weight": 0.75}, [0.0, 1.5, 4.0]),
        # 0.5 × 1.5 × 4 = 3
        ({"weight": "truncate", "granularity": "sequence"}, [2.0] * 3),
        ({"weight": "truncate", "granularity": "sequence", "max_weight": 5.0}, [3.0] * 3),
        ({"weight": "mask", "granularity": "sequence"}, [0.0] * 3),
        ({"weight": "mask", "granularity": "geometric", "max_weight": 1.5}, [3 ** (1 / 3)] * 3),
        ({"weight": "mask", "granularity": "geometric", "max_weight": 1.4}, [0.0] * 3),
    ],
)
def test_importance_weights_of_ratios_0_5_and_1_5_and_4(correction: dict, expected: list[float]) -> None:
    """With reinforce, a token's gradient is -advantage × correction factor. Expected values computed by hand."""
    rule = Rule(LossConfig(objective="reinforce"), OffPolicyCorrectionConfig(**correction))
    tokens = tuple(Token(math.log(0.05 * ratio), math.log(0.05)) for ratio in (0.5, 1.5, 4.0))
    (gradients_T,) = run(Case(rule, [Completion(1.0, 1.0, tokens)], [range(3)]), width=3).gradients
    assert gradients_T == pytest.approx([-factor for factor in expected], rel=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_each_normalization_weighs_a_token_as_in_its_paper(num_tokens: int) -> None:
    counts = {"num_tokens": NUM_TOKENS, "num_rows": NUM_ROWS, "max_tokens": MAX_TOKENS, "row_tokens": num_tokens}
    for normalization in NORMALIZATIONS:
        assert row_weight(normalization, **counts) == pytest.approx(weight_of(normalization, num_tokens), rel=1e-7)


def test_the_rules_cover_every_objective_and_each_of_its_bounds() -> None:
    # All objectives take the behavior anchor × (none, 7 masks), and reinforce also × 5 truncations; all but reinforce
    # and vespo take 3 proximal anchors × 13 corrections. gspo, gmpo and vespo take no mask of tokens, of which each of
    # their 4, 4 and 1 anchors has 3.
    assert BOUNDS.keys() == OBJECTIVES.keys()
    assert len(RULES) == len(OBJECTIVES) * 8 + 5 + (len(OBJECTIVES) - 2) * 3 * 13 - (4 + 4 + 1) * 3
    for objective, bounds in BOUNDS.items():
        met = [rule for rule, _ in RULES.values() if rule.loss.objective == objective]
        for bound in bounds:
            assert any(all(getattr(rule.loss, key) == value for key, value in bound.items()) for rule in met)


@pytest.mark.parametrize("objective", BOUNDS)
@pytest.mark.parametrize("drift", [30.0, -30.0, 1e4, -1e4, 3e38, -3e38])
def test_extreme_ratios_leave_loss_and_gradient_finite(objective: str, drift: float) -> None:
    kl = KlConfig(coef=0.5, importance_weighted=True)
    for correction in (
        OffPolicyCorrectionConfig(),
        OffPolicyCorrectionConfig(anchor="proximal", proximal="log_linear"),
    ):
        for advantage in (1.0, -1.0):
            token = Token(logprob=-2.0, behavior=-2.0 - drift, staleness=1, reference=-2.0 - drift)
            rule = Rule(LossConfig(objective=objective), correction, kl, 0.5)
            found = run(Case(rule, [Completion(advantage, 1.0, (token,))], [[1]]), width=3, garbage=math.nan)
            assert math.isfinite(found.loss) and all(map(math.isfinite, found.sums.values()))


@pytest.mark.parametrize("objective", BOUNDS)
def test_on_policy_the_expected_gradient_is_the_policy_gradient(objective: str) -> None:
    """Σ_v π(v) · gradient of token v's loss = -∇ Σ_v π(v) A(v), for a softmax over six tokens at ratio 1.

    sapo's gate has slope 1 at ratio 1, and dppo's penalty is flat there, so that it holds for all.
    """
    logits_V = torch.tensor([0.3, -1.0, 0.7, 0.0, 1.5, -0.2], requires_grad=True)
    advantages_V = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.25, 0.0])
    logprobs_V = logits_V.log_softmax(-1)
    found, _ = policy_loss(
        LossInputs(
            logprobs_BT=logprobs_V[:, None],
            behavior_logprobs_BT=logprobs_V.detach()[:, None],
            staleness_BT=torch.zeros(6, 1, dtype=torch.int64),
            advantages_BT=advantages_V[:, None],
            weights_B=logprobs_V.detach().exp(),
            mask_BT=torch.ones(6, 1, dtype=torch.bool),
            picked_BT=torch.zeros(6, 1, dtype=torch.bool),
        ),
        LossConfig(objective=objective),
        OffPolicyCorrectionConfig(),
        KlConfig(),
        0.0,
        0.0,
    )
    (gradient_V,) = torch.autograd.grad(found, logits_V, retain_graph=True)
    (expected_V,) = torch.autograd.grad(-(logprobs_V.exp() * advantages_V).sum(), logits_V)
    torch.testing.assert_close(gradient_V, expected_V, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_single_token_dominates_the_gradient(objective: str) -> None:
    """A token with a negative advantage and a ratio of e¹¹ would be 94 % of the gradient without a bound."""

    def largest_share(loss: LossConfig) -> float:
        behavior_BT = torch.full((4096, 1), -11.5)
        logprobs_BT = behavior_BT.clone()
        logprobs_BT[0] = -0.5
        inputs = LossInputs(
            logprobs_BT=logprobs_BT.requires_grad_(),
            behavior_logprobs_BT=behavior_BT,
            staleness_BT=torch.zeros(4096, 1),
            advantages_BT=torch.full((4096, 1), -1.0),
            weights_B=torch.full((4096,), 1 / 4096),
            mask_BT=torch.ones(4096, 1),
            picked_BT=torch.zeros(4096, 1, dtype=torch.bool),
        )
        found, _ = policy_loss(inputs, loss, OffPolicyCorrectionConfig(), KlConfig(), 0.0, 0.0)
        (gradient_BT,) = torch.autograd.grad(found, logprobs_BT)
        return float(gradient_BT.abs().max() / gradient_BT.abs().sum())

    assert largest_share(LossConfig(objective=objective)) < 0.01
    if objective == "grpo":
        assert largest_share(LossConfig(dual_clip=math.inf)) > 0.9
