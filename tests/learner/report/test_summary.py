"""The summary's numbers against numpy, and its reading of files that crashes and resumes leave behind."""

import json
import random
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from learner.report.page import write_report
from learner.report.summary import RunDirectoryError, as_text, lines, read_steps, summarize
from learner.train import train
from protocol.errors import SlipstreamError
from tests.learner.model_engine import tiny_server
from tests.learner.report.synthetic_run import GROUPS_PER_STEP, write_ledger, write_lines, write_run
from tests.learner.runs import make_run

FIELDS = [
    "steps",
    "seconds",
    "reward_first",
    "reward_last",
    "exact_last",
    "staleness_mean",
    "staleness_max",
    "groups_admitted",
    "groups_consumed",
    "groups_dropped",
    "groups_outstanding",
    "groups_lost",
    "prompts_dropped",
    "prompts_truncated",
    "push_stall_median_s",
    "mismatch_mean_abs_logprob",
    "evaluation",
    "evaluation_step",
    "evaluated_sets",
    "training_slowdown",
    "completion_tokens_per_s",
    "wait_shares",
]


def test_every_number_agrees_with_an_independent_computation(tmp_path):
    metrics = write_run(tmp_path, steps=57)
    summary = summarize(tmp_path)

    def column(name: str) -> np.ndarray:
        return np.array([line.get(name, np.nan) for line in metrics])

    assert list(type(summary).__struct_fields__) == FIELDS
    assert summary.steps == 57
    assert summary.seconds == metrics[-1]["elapsed_s"]
    assert summary.reward_first == pytest.approx(column("reward/mean")[:5].mean())
    assert summary.reward_last == pytest.approx(column("reward/mean")[-5:].mean())
    assert summary.exact_last == pytest.approx(column("reward/exact_match")[-5:].mean())
    assert summary.staleness_mean == pytest.approx(column("staleness/mean").mean())
    assert summary.staleness_max == 2.0
    assert summary.push_stall_median_s == pytest.approx(np.median(column("weight_sync/stall_seconds")))
    means = [np.nanmean(column("policy/mismatch_abs_logprob")), np.nanmean(column("parity/abs_logprob"))]
    assert summary.mismatch_mean_abs_logprob == pytest.approx(max(means))
    assert summary.completion_tokens_per_s == pytest.approx(column("rollout/tokens").sum() / summary.seconds)
    waits = {
        part: column(f"bottleneck/{part}").sum() for part in ("server", "reward", "link", "weight_sync", "learner")
    }
    expected = {part: pytest.approx(seconds / column("time/step").sum()) for part, seconds in waits.items()}
    assert summary.wait_shares == expected
    assert list(summary.wait_shares.values()) == sorted(summary.wait_shares.values(), reverse=True)


def test_prompts_that_were_too_long_are_reported_where_there_were_any(tmp_path):
    metrics = write_run(tmp_path, steps=3)
    assert "prompts " not in as_text(summarize(tmp_path))
    write_lines(tmp_path / "metrics.jsonl", [line | {"data/dropped_prompts": 1200.0} for line in metrics])
    assert "\nprompts      1,200 too long, dropped\n" in as_text(summarize(tmp_path))


def test_what_evaluations_cost_the_steps_beside_them_is_reported_where_there_were_any(tmp_path):
    metrics = write_run(tmp_path, steps=3)
    assert "slowdown " not in as_text(summarize(tmp_path)) and "Slowdown" not in page_of(tmp_path)
    slowdowns = [{"evaluation/training_slowdown": slowdown} for slowdown in (1.25, 3.0, 1.5)]
    write_lines(
        tmp_path / "metrics.jsonl", [line | slowdown for line, slowdown in zip(metrics, slowdowns, strict=True)]
    )
    assert "\nslowdown     steps take 1.50 times as long during an evaluation\n" in as_text(summarize(tmp_path))
    assert "1.50 ×" in page_of(tmp_path)


def page_of(run_dir: Path) -> str:
    return write_report(run_dir).read_text()


def test_a_run_reports_the_prompts_that_it_truncated(tmp_path):
    with tiny_server() as server:
        data = {
            "task": "reverse",
            "num_digits": 4,
            "num_prompts": 8,
            "max_prompt_tokens": 4,
            "overlong_prompts": "truncate",
        }
        run = make_run(tmp_path, server.endpoint, steps=1, data=data)
        train(run, resume=False)
    assert "8 too long, truncated" in as_text(summarize(Path(run.run_dir)))


def test_groups_are_counted_by_the_ledger(tmp_path):
    write_run(tmp_path, steps=10)
    summary = summarize(tmp_path)
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        num_of = dict(db.execute("SELECT state, count(*) FROM groups GROUP BY state"))
    db.close()
    assert summary.groups_consumed == num_of["consumed"] == 10 * GROUPS_PER_STEP
    assert summary.groups_dropped == num_of["dropped"] == 2
    assert summary.groups_outstanding == num_of["admitted"] == 3
    assert summary.groups_admitted == sum(num_of.values())
    assert summary.groups_lost == 0


def test_a_group_missing_from_the_ledger_is_lost(tmp_path):
    write_run(tmp_path, steps=10)
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        db.execute("DELETE FROM groups WHERE slot IN (3, 7)")
    db.close()
    assert summarize(tmp_path).groups_lost == 2


def test_the_larger_of_the_two_mismatches_is_reported(tmp_path):
    write_run(tmp_path, steps=4)
    base = {"elapsed_s": 1.0, "policy/mismatch_abs_logprob": 1e-6}
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **base, "parity/abs_logprob": 5e-3}, {"step": 2, **base}])
    assert summarize(tmp_path).mismatch_mean_abs_logprob == 5e-3
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **base}])
    assert summarize(tmp_path).mismatch_mean_abs_logprob == 1e-6


def test_one_bare_step_is_enough_and_absent_numbers_are_none(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "time": 0.0, "elapsed_s": 0.0, "reward/mean": float("nan")}])
    write_ledger(tmp_path / "ledger.db", 1, random.Random(0))
    summary = summarize(tmp_path)
    absent = [name for name in FIELDS if getattr(summary, name) is None]
    assert absent == [
        "reward_first", "reward_last", "exact_last", "staleness_mean", "staleness_max",
        "push_stall_median_s", "mismatch_mean_abs_logprob", "evaluation", "evaluation_step",
        "training_slowdown", "completion_tokens_per_s",
    ]  # fmt: skip
    assert "–" in as_text(summary)


def test_steps_taken_back_by_a_resume_do_not_count(tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = [{"step": step, "value": "old"} for step in range(1, 9)]
    after = [{"step": step, "value": "new"} for step in range(5, 7)]
    write_lines(path, before + after)
    assert [(line["step"], line["value"]) for line in read_steps(path)] == [
        (1, "old"), (2, "old"), (3, "old"), (4, "old"), (5, "new"), (6, "new"),
    ]  # fmt: skip


def test_the_torn_last_line_of_a_killed_learner_is_not_there(tmp_path):
    metrics = write_run(tmp_path, steps=12)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    last = json.dumps(metrics[-1]).encode()
    for kept in range(1, len(last)):
        (tmp_path / "metrics.jsonl").write_bytes(whole[: -len(last) - 1] + last[:kept])
        assert len(read_steps(tmp_path / "metrics.jsonl")) == 11
    (tmp_path / "metrics.jsonl").write_bytes(whole[:-1])
    assert summarize(tmp_path).steps == 12, "whole, only its newline is missing"


@pytest.mark.parametrize(
    "broken", ['{"step": 2, "rew', "[1, 2]", '{"reward/mean": 1.0}', '{"step": "two"}', "\x00\x00\x00"]
)
def test_a_broken_line_in_the_middle_is_named(tmp_path, broken):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + broken + '\n{"step": 3}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl, line 2: expected a JSON object"):
        read_steps(path)


def test_what_is_no_run_directory_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(SlipstreamError, match=r"not a run directory: metrics\.jsonl is missing.*slipstream train"):
        summarize(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunDirectoryError, match="has no optimizer step yet"):
        summarize(tmp_path)
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "elapsed_s": 1.0}])
    with pytest.raises(RunDirectoryError, match=r"ledger\.db, which records lost groups, is missing"):
        summarize(tmp_path)


def test_reading_changes_nothing_in_the_run_directory(tmp_path):
    write_run(tmp_path, steps=5)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    summarize(tmp_path)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_the_console_lines_are_short_and_aligned(tmp_path):
    write_run(tmp_path, steps=57)
    summary = summarize(tmp_path)
    told = lines(summary)
    assert all(len(line) <= 110 for line in told)
    assert {line[12] for line in told} == {" "} and all(line[13] != " " for line in told)
    assert f"{summary.reward_first:.2f} → {summary.reward_last:.2f}" in told[0]
    assert any(line.endswith("0 lost") for line in told)
    assert any(
        line.startswith("waits        mostly for the server's completions (") and line.endswith("% of the time)")
        for line in told
    )
