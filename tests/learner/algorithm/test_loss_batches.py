"""What the loss does not depend on: padding, its width, the order of rows, micro-batches."""

import itertools
import math
import random

import msgspec
import pytest
import torch

from learner.algorithm.loss import policy_loss
from tests.learner.algorithm import oracle
from tests.learner.algorithm.loss_case import Case, make_case, run, tensors_of
from tests.learner.algorithm.loss_rules import RULES

SOME = dict(list(RULES.items())[::13])


@pytest.mark.parametrize("name", SOME)
def test_what_stands_under_the_mask_changes_no_bit(name: str) -> None:
    rule, has_proximal = SOME[name]
    case = make_case(name, rule, is_wild=True, has_proximal=has_proximal)
    clean = run(case)
    for garbage in (math.nan, 1e4, -math.inf):
        assert run(case, garbage=garbage) == clean


@pytest.mark.parametrize("name", SOME)
def test_entropy_counts_on_every_token_whatever_was_rejected(name: str) -> None:
    rule, has_proximal = SOME[name]
    rule = rule._replace(loss=msgspec.structs.replace(rule.loss, entropy_coef=0.25))
    case = make_case(name, rule, is_wild=True, has_proximal=has_proximal)
    for completion, gradients_T in zip(case.completions, run(case, garbage=math.nan).entropy_gradients, strict=True):
        expected = [-0.25 * completion.weight * math.isfinite(token.behaviour) for token in completion.tokens]
        assert gradients_T == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("name", SOME)
def test_micro_batches_of_any_padding_and_order_add_up_to_the_whole_batch(name: str) -> None:
    rule, has_proximal = SOME[name]
    case = make_case(name, rule, is_wild=False, has_proximal=has_proximal)
    whole = run(case)
    rng = random.Random(name)
    order = rng.sample(range(len(case.completions)), len(case.completions))
    loss, gradients = 0.0, {}
    for start, end in itertools.pairwise((0, 2, 3, 6)):
        rows = order[start:end]
        shift = rng.randrange(5)
        positions = [[place + shift for place in case.positions[row]] for row in rows]
        part = run(Case(rule, [case.completions[row] for row in rows], positions), width=14, garbage=math.nan)
        loss += part.loss
        gradients |= zip(rows, part.gradients, strict=True)
    assert loss == pytest.approx(whole.loss, rel=1e-5, abs=1e-5)
    for row, expected in enumerate(whole.gradients):
        assert gradients[row] == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", SOME)
def test_a_micro_batch_without_tokens_has_loss_gradient_and_sums_of_exactly_zero(name: str) -> None:
    rule, has_proximal = SOME[name]
    case = make_case(name, rule, has_proximal=has_proximal)
    inputs = tensors_of(case, garbage=math.nan)
    inputs = msgspec.structs.replace(inputs, mask_BT=torch.zeros_like(inputs.mask_BT))
    loss, sums = policy_loss(inputs, rule.loss, rule.off_policy_correction, rule.kl, rule.kl_coef)
    loss.backward()
    assert loss == 0 and (inputs.logprobs_BT.grad == 0).all()
    assert all(sums[name] == 0 for name in oracle.sums(rule, []))
