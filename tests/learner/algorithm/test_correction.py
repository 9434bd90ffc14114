"""The off-policy corrections by hand. With reinforce a token's gradient is -advantage × what corrections multiply it with."""

import math

import pytest

from learner.config import KlConfig, LossConfig, OffPolicyCorrectionConfig
from tests.learner.algorithm.loss_case import Case, Result, run
from tests.learner.algorithm.oracle import Completion, Rule, Token

REINFORCE = LossConfig(objective="reinforce")
CAPPED = LossConfig(objective="cispo", clip_high=9.0)  # gradient: -advantage × ratio × multiplier


def tokens_of(*ratios: float, **fields) -> list[Token]:
    """Tokens that the behaviour policy gave 0.05, and the current one 0.05 × ratio."""
    return [Token(math.log(0.05 * ratio), math.log(0.05), **fields) for ratio in ratios]


def result_of(tokens: list[Token], rule: Rule, advantage: float = 1.0) -> Result:
    return run(Case(rule, [Completion(advantage, 1.0, tuple(tokens))], [range(len(tokens))]), width=len(tokens))


def factors_of(
    tokens: list[Token], correction: OffPolicyCorrectionConfig, loss=REINFORCE, advantage: float = 1.0
) -> list[float]:
    found = result_of(tokens, Rule(loss, correction), advantage)
    return [-gradient / advantage for gradient in found.gradients[0]]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (OffPolicyCorrectionConfig(), [1.0, 1.0, 1.0]),
        (OffPolicyCorrectionConfig(weight="truncate"), [0.5, 1.5, 2.0]),
        (OffPolicyCorrectionConfig(weight="truncate", max_weight=1.25), [0.5, 1.25, 1.25]),
        (OffPolicyCorrectionConfig(weight="mask"), [0.5, 1.5, 0.0]),
        (OffPolicyCorrectionConfig(weight="mask", max_weight=8.0, min_weight=0.75), [0.0, 1.5, 4.0]),
        # 0.5 × 1.5 × 4 = 3
        (OffPolicyCorrectionConfig(weight="truncate", granularity="sequence"), [2.0] * 3),
        (OffPolicyCorrectionConfig(weight="truncate", granularity="sequence", max_weight=5.0), [3.0] * 3),
        (OffPolicyCorrectionConfig(weight="mask", granularity="sequence"), [0.0] * 3),
        (OffPolicyCorrectionConfig(weight="mask", granularity="geometric", max_weight=1.5), [3 ** (1 / 3)] * 3),
        (OffPolicyCorrectionConfig(weight="mask", granularity="geometric", max_weight=1.4), [0.0] * 3),
    ],
)
def test_importance_weights_of_ratios_a_half_one_and_a_half_and_four(
    correction: OffPolicyCorrectionConfig, expected: list[float]
) -> None:
    assert factors_of(tokens_of(0.5, 1.5, 4.0), correction) == pytest.approx(expected, rel=1e-5)


def test_a_mask_beside_a_ratio_does_not_weigh_a_second_time() -> None:
    factors = factors_of(tokens_of(0.5, 1.5, 4.0), OffPolicyCorrectionConfig(weight="mask"), CAPPED)
    assert factors == pytest.approx([0.5, 1.5, 0.0], rel=1e-5)


def test_a_product_grows_with_the_length_of_a_completion_and_the_geometric_mean_does_not() -> None:
    """The length trap: a hundred tokens 0.012 nats off are e^1.2 = 3.3 off together (TRL's issue 4772)."""
    tokens = tokens_of(*[math.exp(0.012)] * 100)
    assert (
        factors_of(tokens, OffPolicyCorrectionConfig(weight="mask", granularity="sequence", max_weight=3.0))
        == [0.0] * 100
    )
    kept = factors_of(tokens, OffPolicyCorrectionConfig(weight="mask", granularity="geometric", max_weight=1.02))
    assert kept == pytest.approx([math.exp(0.012)] * 100, rel=1e-5)


def test_a_product_stops_at_twenty_nats_and_so_never_becomes_zero_or_infinite() -> None:
    """Ten ratios of e⁻¹⁵ would be e⁻¹⁵⁰, which is 0 in float32."""
    correction = OffPolicyCorrectionConfig(weight="truncate", granularity="sequence")
    for ratio, weight in ((math.exp(-15), math.exp(-20)), (math.exp(15), 2.0)):
        factors = factors_of(tokens_of(*[ratio] * 10), correction)
        assert factors == pytest.approx([weight] * 10, rel=1e-5, abs=0)


@pytest.mark.parametrize(
    ("advantage", "ratios", "kept"),
    [
        (-1.0, (0.5, 0.5), False),  # mean log(behaviour / policy) = 0.69 > 0.5
        (-1.0, (0.5, 1.0), True),  # 0.35
        (-1.0, (0.1, 9.0), True),  # one token far below, but not the mean
        (-1.0, (2.0, 2.0), True),  # the policy moved towards it, not away
        (1.0, (0.5, 0.5), True),
        (0.0, (0.5, 0.5), True),
    ],
)
def test_the_sequence_mask_drops_only_bad_completions_the_policy_has_left(
    advantage: float, ratios: tuple[float, ...], kept: bool
) -> None:
    rule = Rule(REINFORCE, OffPolicyCorrectionConfig(sequence_mask=0.5))
    assert result_of(tokens_of(*ratios), rule, advantage).sums["kept"] == (2 if kept else 0)


@pytest.mark.parametrize(("stale_token_weight", "expected"), [(0.0, [1, 1, 0, 0]), (0.25, [1, 1, 0.25, 0.25])])
def test_tokens_more_versions_old_than_allowed_count_less(stale_token_weight: float, expected: list[float]) -> None:
    tokens = [tokens_of(1.0, staleness=staleness)[0] for staleness in (0, 2, 3, 9)]
    correction = OffPolicyCorrectionConfig(max_token_staleness=2, stale_token_weight=stale_token_weight)
    assert factors_of(tokens, correction) == expected
    assert result_of(tokens, Rule(REINFORCE, correction)).sums["stale"] == 2


@pytest.mark.parametrize(("staleness", "ratio", "weight"), [(0, 8.0, 1.0), (1, 8**0.5, 8**0.5), (2, 2.0, 4.0)])
def test_the_log_linear_anchor_splits_the_drift_by_the_age_of_the_token(
    staleness: int, ratio: float, weight: float
) -> None:
    """s of s + 1 parts of log(policy / behaviour) belong to the weight, the last part to the ratio."""
    tokens = tokens_of(8.0, staleness=staleness)
    log_linear = OffPolicyCorrectionConfig(anchor="proximal", proximal="log_linear")
    assert factors_of(tokens, log_linear, CAPPED) == pytest.approx([ratio], rel=1e-5)
    weighed = OffPolicyCorrectionConfig(anchor="proximal", proximal="log_linear", weight="truncate", max_weight=5.0)
    assert factors_of(tokens, weighed, CAPPED) == pytest.approx([ratio * weight], rel=1e-5)


@pytest.mark.parametrize(
    ("proximal_ratio", "ratio", "weight"),
    [(4.0, 1.5, 4.0), (3.0, 2.0, 3.0), (None, 1.0, 6.0)],
    ids=["4", "3", "the current policy"],
)
def test_decoupled_ppo_takes_the_ratio_to_the_proximal_and_weighs_the_proximal_against_the_behaviour(
    proximal_ratio: float | None, ratio: float, weight: float
) -> None:
    proximal = None if proximal_ratio is None else math.log(0.05 * proximal_ratio)
    tokens = tokens_of(6.0, proximal=proximal)
    exact = OffPolicyCorrectionConfig(anchor="proximal")
    assert factors_of(tokens, exact, CAPPED) == pytest.approx([ratio], rel=1e-5)
    weighed = OffPolicyCorrectionConfig(anchor="proximal", weight="mask", max_weight=7.0)
    assert factors_of(tokens, weighed, CAPPED) == pytest.approx([ratio * weight], rel=1e-5)
    bounded = OffPolicyCorrectionConfig(anchor="proximal", weight="truncate", max_weight=2.5)
    assert factors_of(tokens, bounded, CAPPED) == pytest.approx([ratio * 2.5], rel=1e-5)


@pytest.mark.parametrize("granularity", ["token", "sequence", "geometric"])
def test_an_importance_weight_carries_no_gradient(granularity: str) -> None:
    """d/dp of r(p) · w · A is r · w · A only where w is held fixed; r and w of each token are 1.2 and its granularity's."""
    correction = OffPolicyCorrectionConfig(
        anchor="proximal", weight="truncate", granularity=granularity, max_weight=4.0
    )
    tokens = tokens_of(1.2 * 1.5, 1.2 * 1.5, proximal=math.log(0.05 * 1.5))
    weight = {"token": 1.5, "sequence": 1.5**2, "geometric": 1.5}[granularity]
    assert factors_of(tokens, correction, CAPPED) == pytest.approx([1.2 * weight] * 2, rel=1e-5)


def test_tokens_that_carry_the_policy_are_the_only_ones_with_an_objective() -> None:
    tokens = [
        token._replace(carries_policy=carries) for token, carries in zip(tokens_of(1, 1, 1), (1, 0, 1), strict=True)
    ]
    rule = Rule(LossConfig(objective="reinforce", top_entropy_frac=0.5))
    found = result_of(tokens, rule)
    assert found.gradients == [[-1.0, 0.0, -1.0]] and found.sums["kept"] == 2 and found.sums["tokens"] == 3


def test_what_is_rejected_leaves_the_weight_of_the_rest_as_it_was() -> None:
    tokens = tokens_of(1.0, 4.0, 1.0)
    without, with_mask = (factors_of(tokens, OffPolicyCorrectionConfig(weight=weight)) for weight in ("none", "mask"))
    assert without == [1.0, 1.0, 1.0] and with_mask == [1.0, 0.0, 1.0]


def test_kl_and_entropy_stay_on_tokens_that_a_correction_rejects() -> None:
    loss = LossConfig(objective="reinforce", entropy_coef=0.5)
    tokens = tokens_of(4.0, 4.0, reference=math.log(0.1), entropy=2.0)
    rule = Rule(loss, OffPolicyCorrectionConfig(weight="mask"), KlConfig(coef=1.0), 1.0)
    found = result_of(tokens, rule)
    assert found.sums["kept"] == 0 and found.sums["loss"] == 0
    k3 = 0.5 - math.log(0.5) - 1
    assert found.loss == pytest.approx(2 * (k3 - 0.5 * 2.0), rel=1e-5)
    assert found.gradients[0] == pytest.approx([1 - 0.5] * 2, rel=1e-5)
    assert found.entropy_gradients == [[-0.5, -0.5]]


def test_the_health_sums_of_a_hand_made_completion() -> None:
    """Ratios ½, 1½ and 4: a mean weight of 2 and an effective sample of (Σr)² / Σr² = 36 / 18.5 tokens."""
    found = result_of(
        tokens_of(0.5, 1.5, 4.0), Rule(REINFORCE, OffPolicyCorrectionConfig(weight="mask", min_weight=0.75))
    )
    expected = {
        "tokens": 3,
        "ratio": 6.0,
        "ratio_squared": 18.5,
        "behaviour_kl": 6.0 - math.log(3.0) - 3,
        "bounded": 2,
        "kept": 1,
        "clipped": 0,
        "loss": -1.5 * math.log(0.05 * 1.5),
    }
    assert {name: found.sums[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert "reference_kl" not in found.sums


def test_a_clip_is_not_counted_on_a_token_that_was_rejected() -> None:
    rule = Rule(LossConfig(), OffPolicyCorrectionConfig(weight="mask"))
    assert result_of(tokens_of(1.5, 1.6, 4.0), rule).sums["clipped"] == 2
