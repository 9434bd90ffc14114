"""Warnings about off-policy trouble: logged once when a sign appears, and never in a healthy run."""

import logging

import pytest

from learner.report.run_log import HealthMonitor, unhealthy

HEALTHY = {
    "policy/ratio_mean": 1.01,
    "policy/ess": 0.97,
    "policy/behavior_kl": 0.002,
    "loss/clipped_frac": 0.03,
    "loss/max_token_share": 0.02,
    "loss/max_token_multiplier": 3.5,
    "loss/kept_frac": 0.98,
} | {f"loss/kept_frac_length_q{q}": 0.97 for q in range(1, 5)}


def test_a_healthy_step_and_one_without_tokens_show_nothing() -> None:
    assert unhealthy(HEALTHY) == {} and unhealthy({"loss/policy": 0.0}) == {}
    # The only wrong completion of a step: its 3 tokens have half of the total advantage.
    assert unhealthy(HEALTHY | {"loss/max_token_share": 0.167, "loss/max_token_multiplier": 1.0}) == {}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("policy/ratio_mean", 0.4, "0.40, outside 0.5 to 2"),
        ("policy/ratio_mean", 2.5, "2.50, outside 0.5 to 2"),
        ("policy/ess", 0.25, "25% of the tokens, below 30 %"),
        ("policy/behavior_kl", 0.3, "0.30 nats per token"),
        ("loss/clipped_frac", 0.3, "30% of the tokens are clipped"),
        ("loss/max_token_share", 0.3, "one token makes up 30% of an update's gradient, 3.5 times its"),
        ("loss/kept_frac_length_q4", 0.4, "97%, 97%, 97%, 40%"),
    ],
)
def test_each_warning_names_its_bound(name: str, value: float, expected: str) -> None:
    (sign,) = unhealthy(HEALTHY | {name: value}).values()
    assert expected in sign


def test_a_lasting_sign_is_logged_once_and_again_after_it_returns(caplog: pytest.LogCaptureFixture) -> None:
    health = HealthMonitor()
    with caplog.at_level(logging.WARNING):
        for step, ess in enumerate([0.9, 0.2, 0.1, 0.9, 0.2], start=1):
            health.watch(step, HEALTHY | {"policy/ess": ess})
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 2", "step 5"]
