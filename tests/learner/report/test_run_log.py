"""The line of the last step with a late evaluation, and warnings about off-policy trouble, logged once."""

import json
import logging
from pathlib import Path

import pytest

from learner.config import ReportConfig
from learner.report.run_log import HealthMonitor, RunLog, unhealthy
from learner.storage.run_dir import RunDir
from tests.learner.runs import make_run

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


def test_a_resume_adds_the_last_evaluation_to_the_line_of_its_step(tmp_path: Path) -> None:
    line = {"step": 4, "elapsed_s": 8.0, "evaluation/seconds": 0.5, "evaluation/step": 2, "evaluation/reward/low": 0.1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    run_dir = RunDir(tmp_path, make_run(tmp_path, "tcp://a:1"))
    log = RunLog(run_dir, ReportConfig(trackers=()), num_steps=4)
    log.amend(4, {"evaluation/step": 2})  # an evaluation that the line has
    log.amend(3, {"evaluation/step": 3})  # the checkpoint is older than the line
    log.amend(4, {"evaluation/step": 4, "evaluation/reward": 0.5})
    log.close()
    run_dir.close()
    amended = {"step": 4, "elapsed_s": 8.0, "evaluation/seconds": 0.5, "evaluation/step": 4, "evaluation/reward": 0.5}
    assert [json.loads(one) for one in run_dir.metrics.read_text().splitlines()] == [line, amended]
