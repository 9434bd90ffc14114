"""Rates read from the directory of a simulated run with known rates."""

import json
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.planning.measured import LedgerGroup, MeasuredRun, idle_frac, observed, rates_of, read_run
from deploy.planning.simulation import simulate
from learner.report.summary import RunDirectoryError
from protocol.errors import ConfigError
from tests.deploy.planned_run import CONSTANT, SPREAD, setup, write_run

TRUE = msgspec.structs.replace(
    CONSTANT,
    lengths=SPREAD,
    decode_token_s=2e-4,
    score_s=0.01,
    weight_sync_s=0.4,
    weight_sync_feed_s=0.02,
    weight_sync_stall_s=0.35,
)
SYNCHRONOUS = {"max_staleness": 0}
OVERLAPPED = {"max_staleness": 2, "weight_sync": {"overlap_with_training": True}}
MORE_THAN_SLOTS = {"max_staleness": 4, "groups_per_step": 16}


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """Return the directory of a run of 9 steps."""
    write_run(tmp_path / "run", setup(TRUE), steps=9)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("learner", "servers", "load"), [(SYNCHRONOUS, 2, 32), (OVERLAPPED, 1, 64), (MORE_THAN_SLOTS, 2, 64)]
)
def test_rates_are_read_from_the_directory_of_a_run(
    tmp_path: Path, learner: dict[str, Any], servers: int, load: int
) -> None:
    """`load`: the maximum number of sequences of a server."""
    true = setup(TRUE, servers=servers, learner=learner)
    write_run(tmp_path / "run", true, steps=24)
    run = read_run(tmp_path / "run")
    rates, error = rates_of(run, num_ranks=1)
    assert run.num_servers == servers
    assert rates.decode_s(load) == pytest.approx(TRUE.decode_s(load), rel=0.1)
    assert error < 0.1
    assert rates.score_s == pytest.approx(TRUE.score_s, rel=0.01)
    assert rates.learner_token_s == pytest.approx(TRUE.learner_token_s, rel=0.01)
    assert (rates.weight_sync_s, rates.weight_sync_feed_s, rates.weight_sync_stall_s) == pytest.approx(
        (0.4, 0.02, 0.35), rel=0.01
    )
    predicted = simulate(msgspec.structs.replace(true, rates=rates), steps=60, seed=1)
    assert predicted.samples_per_s == pytest.approx(observed(run).samples_per_s, rel=0.1)
    assert predicted.server_idle_frac == pytest.approx(observed(run).server_idle_frac, abs=0.1)
    assert predicted.learner_idle_frac == pytest.approx(observed(run).learner_idle_frac, abs=0.1)
    assert predicted.staleness_mean == pytest.approx(observed(run).staleness_mean, abs=0.25)


def test_idle_time_is_time_without_groups_in_flight() -> None:
    asked = [LedgerGroup(0, 1, began, ended, ended) for began, ended in [(0, 4), (1, 2), (3, 5), (7, 8), (9, 30)]]
    assert idle_frac(asked, 0, 10) == pytest.approx(0.3)
    assert idle_frac(asked, 4, 10) == pytest.approx(0.5)


def lines_of(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines()


def write_lines(run_dir: Path, lines: Iterable[str]) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_a_directory_that_is_not_a_run_is_rejected(short: Path) -> None:
    with pytest.raises(ConfigError, match=r"config file .*config\.toml does not exist"):
        read_run(short.parent)
    lines = lines_of(short)
    write_lines(short, lines[:5])
    with pytest.raises(ConfigError, match=r"has 5 steps; at least 8"):
        read_run(short)
    write_lines(short, lines)
    with sqlite3.connect(short / "ledger.db") as ledger:
        ledger.execute("DELETE FROM groups")
    with pytest.raises(ConfigError, match=r"has no scored group in ledger\.db; expected the groups of its 9 steps"):
        read_run(short)
    (short / "ledger.db").unlink()
    with pytest.raises(ConfigError, match="cannot be read as a run directory"):
        read_run(short)


def rates(run: MeasuredRun) -> object:
    return rates_of(run, num_ranks=1)


@pytest.mark.parametrize(
    ("read", "prefix", "message"),
    [
        (rates, "rollout/tokens", "is missing the metric rollout/tokens"),
        (rates, "weight_sync/", r"has no weight sync \(weight_sync/seconds\) in its last 7 steps.* longer run"),
        (observed, "staleness/max", "is missing the metric staleness/max"),
    ],
)
def test_a_run_with_a_missing_metric_is_rejected(
    short: Path, read: Callable[[MeasuredRun], object], prefix: str, message: str
) -> None:
    run = read_run(short)
    lines = [{key: value for key, value in line.items() if not key.startswith(prefix)} for line in run.lines]
    with pytest.raises(ConfigError, match=message):
        read(run._replace(lines=lines))


def test_a_null_metric_is_rejected_with_its_step(short: Path) -> None:
    run = read_run(short)

    def with_null(metric: str) -> list[dict[str, Any]]:
        return [line | ({metric: None} if line["step"] == 9 else {}) for line in run.lines]

    with pytest.raises(ConfigError, match=r"^rollout/tokens = null .* in step 9 .*; expected a number"):
        rates(run._replace(lines=with_null("rollout/tokens")))
    with pytest.raises(ConfigError, match=r"^time = null"):
        observed(run._replace(lines=with_null("time")))
    write_lines(short, map(json.dumps, with_null("servers/ready")))
    with pytest.raises(ConfigError, match=r"^servers/ready = null"):
        read_run(short)


def test_steps_undone_by_a_resume_count_once_and_without_their_time(tmp_path: Path) -> None:
    write_run(tmp_path / "run", setup(TRUE), steps=12)
    undisturbed = read_run(tmp_path / "run")
    lines = [json.loads(line) for line in lines_of(tmp_path / "run")]
    undone_s = lines[8]["elapsed_s"] - lines[5]["elapsed_s"]  # steps 7 to 9, from a checkpoint of step 6
    again = [line | {"elapsed_s": line["elapsed_s"] + undone_s} for line in lines[6:]]
    amended = again[-1] | {"weight_sync/seconds": 7.0}
    write_lines(tmp_path / "run", map(json.dumps, [*lines[:9], *again, amended]))
    resumed = read_run(tmp_path / "run")
    assert [line["step"] for line in resumed.lines] == list(range(1, 13))
    assert resumed.lines[-1]["weight_sync/seconds"] == 7.0
    assert observed(resumed).step_s == pytest.approx(observed(undisturbed).step_s)


def test_blank_lines_and_a_truncated_last_line_are_skipped_and_others_are_errors(short: Path) -> None:
    metrics = short / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text("\n" + text.replace("\n", "\n \n\n") + text[:40])
    assert [line["step"] for line in read_run(short).lines] == list(range(1, 10))
    for broken in (text[:40] + "\n" + text, "[1]\n" + text):
        metrics.write_text(broken)
        with pytest.raises(RunDirectoryError, match=r"metrics.jsonl, line 1: expected a JSON object"):
            read_run(short)
