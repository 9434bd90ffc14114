"""Rates read from the directory of a run whose rates are known, because it was simulated."""

import json
from pathlib import Path

import msgspec
import pytest

from deploy.planning.measured import Asked, idle_frac, observed, rates_of, read_run
from deploy.planning.simulation import simulate
from protocol.errors import ConfigError
from tests.deploy.planned_run import CONSTANT, SPREAD, setup, write_run

TRUE = msgspec.structs.replace(
    CONSTANT, lengths=SPREAD, decode_token_s=2e-4, score_s=0.01, push_s=0.4, push_feed_s=0.02, push_stall_s=0.35
)
LEARNERS = {
    "synchronous": {"max_staleness": 0},
    "overlapped": {"max_staleness": 2, "push": {"overlap": True}},
    "more than there are places": {"max_staleness": 4, "groups_per_step": 16},
}


@pytest.mark.parametrize(
    ("kind", "servers", "load"),
    [
        pytest.param("synchronous", 1, 64, marks=pytest.mark.slow),
        ("synchronous", 2, 32),
        ("overlapped", 1, 64),
        ("more than there are places", 2, 64),
    ],
)
def test_the_rates_of_a_run_are_found_in_its_directory(tmp_path: Path, kind: str, servers: int, load: int) -> None:
    """`load`: the most sequences that a server runs."""
    true = setup(TRUE, servers=servers, learner=LEARNERS[kind])
    write_run(tmp_path / "run", true, steps=24)
    run = read_run(tmp_path / "run")
    rates, error = rates_of(run, num_ranks=1)
    assert run.num_servers == servers
    assert rates.decode_s(load) == pytest.approx(TRUE.decode_s(load), rel=0.1)
    assert error < 0.1
    assert rates.score_s == pytest.approx(TRUE.score_s, rel=0.01)
    assert rates.learner_token_s == pytest.approx(TRUE.learner_token_s, rel=0.01)
    assert (rates.push_s, rates.push_feed_s, rates.push_stall_s) == pytest.approx((0.4, 0.02, 0.35), rel=0.01)
    predicted = simulate(msgspec.structs.replace(true, rates=rates), steps=60, seed=1)
    assert predicted.samples_per_s == pytest.approx(observed(run).samples_per_s, rel=0.1)
    assert predicted.server_idle_frac == pytest.approx(observed(run).server_idle_frac, abs=0.1)
    assert predicted.learner_idle_frac == pytest.approx(observed(run).learner_idle_frac, abs=0.1)
    assert predicted.staleness_mean == pytest.approx(observed(run).staleness_mean, abs=0.25)


def test_the_rates_of_one_run_predict_another(tmp_path: Path) -> None:
    write_run(tmp_path / "one", setup(TRUE, learner=LEARNERS["synchronous"]), steps=24)
    rates, _ = rates_of(read_run(tmp_path / "one"), num_ranks=1)
    other = setup(TRUE, servers=2, learner=LEARNERS["overlapped"] | {"groups_per_step": 16})
    truth = simulate(other, steps=60)
    predicted = simulate(msgspec.structs.replace(other, rates=rates), steps=60)
    assert predicted.samples_per_s == pytest.approx(truth.samples_per_s, rel=0.15)


def test_idle_is_the_time_in_which_no_group_is_under_way() -> None:
    asked = [Asked(0, 1, began, ended, ended) for began, ended in [(0, 4), (1, 2), (3, 5), (7, 8), (9, 30)]]
    assert idle_frac(asked, 0, 10) == pytest.approx(0.3)
    assert idle_frac(asked, 4, 10) == pytest.approx(0.5)


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config file .*config\.toml does not exist"):
        read_run(tmp_path)
    write_run(tmp_path / "run", setup(TRUE), steps=9)
    (tmp_path / "run" / "ledger.db").unlink()
    with pytest.raises(ConfigError, match="cannot be read as a run directory"):
        read_run(tmp_path / "run")


def test_a_run_of_too_few_steps_or_of_other_metrics_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "run", setup(TRUE), steps=9)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join(lines[:5]))
    with pytest.raises(ConfigError, match=r"has 5 steps and .* at least 8"):
        read_run(tmp_path / "run")
    without = [{key: value for key, value in json.loads(line).items() if key != "rollout/tokens"} for line in lines]
    metrics.write_text("\n".join(map(json.dumps, without)))
    with pytest.raises(ConfigError, match="lacks the metric rollout/tokens"):
        rates_of(read_run(tmp_path / "run"), num_ranks=1)
