"""The summary's numbers, checked with numpy; and files that crashes and resumes leave behind."""

import json
import random
import sqlite3
import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from learner.report.page import write_report
from learner.report.summary import RunDirectoryError, format_summary, read_metrics, read_steps, summarize
from protocol.errors import SlipstreamError
from tests.learner.report.synthetic_run import GROUPS_PER_STEP, write_ledger, write_lines, write_run


def test_every_number_equals_an_independent_computation_and_no_file_changes(tmp_path: Path) -> None:
    metrics = write_run(tmp_path, steps=57)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    summary = summarize(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    def column(name: str) -> np.ndarray:
        return np.array([line.get(name, np.nan) for line in metrics])

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
    assert summary.completion_tokens_per_s == pytest.approx(column("rollout/tokens").sum() / column("time/step").sum())
    waits = {
        part: column(f"bottleneck/{part}").sum() for part in ("server", "reward", "link", "weight_sync", "learner")
    } | {"reference": 0.0}  # the run has no server for it
    expected = {part: pytest.approx(seconds / column("time/step").sum()) for part, seconds in waits.items()}
    assert summary.wait_shares == expected
    assert list(summary.wait_shares.values()) == sorted(summary.wait_shares.values(), reverse=True)


def test_rare_metrics_are_reported_if_they_were_recorded(tmp_path: Path) -> None:
    metrics = write_run(tmp_path, steps=3)
    text, page = format_summary(summarize(tmp_path)), write_report(tmp_path).read_text()
    assert "prompts " not in text and "slowdown " not in text and "Slowdown" not in page
    counts = {"data/dropped_prompts": 1200.0, "data/truncated_prompts": 8.0}
    for line, slowdown in zip(metrics, (1.25, 3.0, 1.5), strict=True):
        line |= counts | {"evaluation/training_slowdown": slowdown}
    write_lines(tmp_path / "metrics.jsonl", metrics)
    text, page = format_summary(summarize(tmp_path)), write_report(tmp_path).read_text()
    assert "\nprompts      1,200 too long, dropped; 8 too long, truncated\n" in text
    assert "\nslowdown     steps take 1.50 times as long during an evaluation\n" in text and "1.50 ×" in page


def test_groups_are_counted_from_the_ledger_and_missing_groups_are_lost(tmp_path: Path) -> None:
    write_run(tmp_path, steps=10)
    summary = summarize(tmp_path)
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as db, db:
        num_of = dict(db.execute("SELECT state, count(*) FROM groups GROUP BY state"))
        db.execute("DELETE FROM groups WHERE slot IN (3, 7)")
    assert summary.groups_consumed == num_of["consumed"] == 10 * GROUPS_PER_STEP
    assert summary.groups_dropped == num_of["dropped"] == 2
    assert summary.groups_outstanding == num_of["admitted"] == 3
    assert summary.groups_admitted == sum(num_of.values())
    assert (summary.groups_lost, summarize(tmp_path).groups_lost) == (0, 2)


def test_the_larger_of_the_two_mismatches_is_reported(tmp_path: Path) -> None:
    write_run(tmp_path, steps=4)
    base = {"elapsed_s": 1.0, "policy/mismatch_abs_logprob": 1e-6}
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **base, "parity/abs_logprob": 5e-3}, {"step": 2, **base}])
    assert summarize(tmp_path).mismatch_mean_abs_logprob == 5e-3
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, **base}])
    assert summarize(tmp_path).mismatch_mean_abs_logprob == 1e-6


def test_one_step_is_enough_and_missing_numbers_are_none(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "time": 0.0, "elapsed_s": 0.0, "reward/mean": float("nan")}])
    write_ledger(tmp_path / "ledger.db", 1, random.Random(0))
    summary = summarize(tmp_path)
    absent = [name for name in summary.__struct_fields__ if getattr(summary, name) is None]
    assert absent == [
        "reward_first", "reward_last", "exact_last", "staleness_mean", "staleness_max",
        "push_stall_median_s", "mismatch_mean_abs_logprob", "evaluation", "evaluation_step",
        "training_slowdown", "completion_tokens_per_s",
    ]  # fmt: skip
    assert "–" in format_summary(summary)


def test_steps_discarded_by_a_resume_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    before = [{"step": step, "value": "old"} for step in range(1, 9)]
    after = [{"step": step, "value": "new"} for step in range(5, 7)]
    write_lines(path, before + after)
    assert [(line["step"], line["value"]) for line in read_steps(path)] == [
        (1, "old"), (2, "old"), (3, "old"), (4, "old"), (5, "new"), (6, "new"),
    ]  # fmt: skip


def test_the_speed_after_a_resume_is_that_of_the_steps_that_count(tmp_path: Path) -> None:
    write_ledger(tmp_path / "ledger.db", 1, random.Random(0))
    steps = [*range(1, 9), *range(5, 11)]
    step = {"rollout/tokens": 200.0, "time/step": 0.25}
    lines = [{"step": number, "elapsed_s": 0.25 * i, **step} for i, number in enumerate(steps, 1)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    assert summarize(tmp_path).completion_tokens_per_s == 800.0


def test_the_incomplete_last_line_of_a_killed_learner_is_ignored(tmp_path: Path) -> None:
    metrics = write_run(tmp_path, steps=12)
    whole = (tmp_path / "metrics.jsonl").read_bytes()
    last = json.dumps(metrics[-1]).encode()
    for kept in range(1, len(last), 40):
        (tmp_path / "metrics.jsonl").write_bytes(whole[: -len(last) - 1] + last[:kept])
        assert len(read_steps(tmp_path / "metrics.jsonl")) == 11
    (tmp_path / "metrics.jsonl").write_bytes(whole[:-1])
    assert summarize(tmp_path).steps == 12, "the line is complete without its newline"


@pytest.mark.parametrize("broken", ['{"step": 2, "rew', "[1, 2]", '{"reward/mean": 1.0}', '{"step": "two"}'])
def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + broken + '\n{"step": 3}\n')
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl, line 2: expected a JSON object"):
        read_steps(path)
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl, line 2: expected a JSON object"):
        read_metrics(tmp_path)


def test_a_broken_last_line_is_torn_only_without_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert read_steps(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"st\n')
    with pytest.raises(RunDirectoryError, match=r"line 2"):
        read_steps(path)


def test_reading_a_long_run_takes_hardly_more_memory_than_its_numbers(tmp_path: Path) -> None:
    """Neither the text of the file nor the names of each line are there with all numbers at once."""
    line = {f"area/a name of some length {i}": i + 0.5 for i in range(60)}
    write_lines(tmp_path / "metrics.jsonl", [{"step": step} | line for step in range(1, 501)])
    read_metrics(tmp_path)  # names are kept once for all runs
    tracemalloc.start()
    try:
        metrics = read_metrics(tmp_path)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(metrics) == 500 and most <= 1.2 * kept


def test_a_directory_that_is_not_a_run_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(SlipstreamError, match=r"not a run directory: metrics\.jsonl is missing.*slipstream train"):
        summarize(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunDirectoryError, match="has no optimizer step yet"):
        summarize(tmp_path)
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "elapsed_s": 1.0}])
    with pytest.raises(RunDirectoryError, match=r"ledger\.db, which records lost groups, is missing"):
        summarize(tmp_path)
