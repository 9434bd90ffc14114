"""The off-policy corrections by hand. With reinforce a token's gradient is -advantage × what corrections multiply it with."""

import math

import pytest

from learner.config import LossConfig, OffPolicyCorrectionConfig
from tests.learner.algorithm.loss_case import Case, Result, run
from tests.learner.algorithm.oracle import Completion, Rule, Token

REINFORCE = LossConfig(objective="reinforce")


def tokens_of(*ratios: float, **fields) -> list[Token]:
    """Tokens that the behaviour policy gave 0.05, and the current one 0.05 × ratio."""
    return [Token(math.log(0.05 * ratio), math.log(0.05), **fields) for ratio in ratios]


def result_of(tokens: list[Token], rule: Rule, advantage: float = 1.0) -> Result:
    return run(Case(rule, [Completion(advantage, 1.0, tuple(tokens))], [range(len(tokens))]), width=len(tokens))


def factors_of(tokens: list[Token], loss=REINFORCE, **correction) -> list[float]:
    found = result_of(tokens, Rule(loss, OffPolicyCorrectionConfig(**correction)))
    return [-gradient for gradient in found.gradients[0]]


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
def test_importance_weights_of_ratios_a_half_one_and_a_half_and_four(correction: dict, expected: list[float]) -> None:
    assert factors_of(tokens_of(0.5, 1.5, 4.0), **correction) == pytest.approx(expected, rel=1e-5)


def test_a_product_stops_at_twenty_nats_and_so_never_becomes_zero_or_infinite() -> None:
    """Ten ratios of e⁻¹⁵ would be e⁻¹⁵⁰, which is 0 in float32."""
    for ratio, weight in ((math.exp(-15), math.exp(-20)), (math.exp(15), 2.0)):
        factors = factors_of(tokens_of(*[ratio] * 10), weight="truncate", granularity="sequence")
        assert factors == pytest.approx([weight] * 10, rel=1e-5, abs=0)
