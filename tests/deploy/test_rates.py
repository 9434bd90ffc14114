"""Rates: sampled lengths, decoding times from measured points, and invalid rates."""

import msgspec
import numpy as np
import pytest

from deploy.planning.rates import Lengths, Rates, decode_rate
from protocol.errors import ConfigError
from tests.deploy.planned_run import SPREAD, constant


@pytest.mark.parametrize(
    "lengths",
    [
        SPREAD,
        constant(7),
        Lengths(p10=18, p50=107, p90=256, mean=124, max=256, truncated_frac=0.19),
        Lengths(p10=40, p50=300, p90=2000, mean=800, max=16384),
    ],
)
def test_sampled_lengths_have_the_measured_mean_quantiles_and_truncated_share(lengths: Lengths) -> None:
    drawn = lengths.sampler().draw(np.random.default_rng(0), 200_000)
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.02)
    assert np.median(drawn) == pytest.approx(lengths.p50, rel=0.1)
    assert drawn.min() >= 1 and drawn.max() <= lengths.max
    assert (drawn == lengths.max).mean() >= 0.95 * lengths.truncated_frac
    assert (drawn == np.rint(drawn)).all()


def test_a_mean_that_contradicts_the_quantiles_is_rejected() -> None:
    with pytest.raises(ConfigError, match="mean completion length of 4000 does not fit"):
        Lengths(p10=10, p50=20, p90=30, mean=4000, max=100).sampler()


@pytest.mark.parametrize(
    "changes", [{"p10": 0.5}, {"p50": 10.0}, {"p90": 300.0}, {"truncated_frac": 1.5}, {"p10": float("nan")}]
)
def test_quantiles_out_of_order_are_rejected(changes: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError, match="expected 1 ≤ p10 ≤ p50 ≤ p90 ≤ max"):
        msgspec.convert(msgspec.to_builtins(SPREAD) | changes, Lengths)


def test_a_negative_rate_is_rejected() -> None:
    given = {"decode_step_s": 0.01, "decode_token_s": 1e-4, "learner_token_s": 1e-4, "weight_sync_s": -1.0}
    with pytest.raises(msgspec.ValidationError, match="weight_sync_s = -1"):
        msgspec.convert(given | {"lengths": msgspec.to_builtins(SPREAD)}, Rates)


def test_decoding_times_are_fitted_from_throughput_at_several_loads() -> None:
    points = [(running, running / (0.02 + 1e-4 * running)) for running in (1, 32, 256)]
    assert decode_rate(points) == pytest.approx((0.02, 1e-4))
    step_s, token_s = decode_rate([(1, 50.0), (64, 6400.0)])
    assert step_s > 0 and token_s == 0, "a time that falls with load counts as independent of load"
    for impossible in ([(64, 3000.0)], [(64, 3000.0), (64, 3100.0)], [(0, 10.0), (8, 100.0)], [(1, -5.0), (8, 10.0)]):
        with pytest.raises(ConfigError, match="two or more numbers of running sequences"):
            decode_rate(impossible)
