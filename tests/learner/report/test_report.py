"""The report: standalone, safe against model output, complete, and explicit about missing data."""

import base64
import hashlib
import random
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from learner.report.charts import Chart, evaluations_of_metrics, run_charts
from learner.report.history import encoded
from learner.report.page import write_report
from learner.report.records import Timeline
from learner.report.sample_view import MAX_COMPLETIONS
from learner.report.series import MAX_POINTS, extremes, moving_mean
from learner.report.summary import read_metrics
from learner.report.templates import json_of, script
from tests.learner.report.pages import Page, page_of
from tests.learner.report.synthetic_run import metrics_of, write_ledger, write_lines, write_run

TITLES = [
    "Reward per step", "Reward over time", "Each reward function", "Staleness of consumed groups", "Staleness per step",
    "KL to the reference", "Time per step", "Entropy", "Clipped tokens", "Gradient norm", "Completion length",
    "Truncated completions",
    "Reward deviation", "Loss", "Learning rate", "Idle time", "Weight sync time", "Mismatch of server and learner",
]  # fmt: skip
INF = float("inf")
LATE = [1_000_001.0, 1_000_002.0, 1_000_003.0]


def test_the_report_of_a_run_is_complete_and_standalone(tmp_path: Path) -> None:
    write_run(tmp_path / "my-run", steps=60)
    assert "<h2>Events" not in write_report(tmp_path / "my-run").read_text()
    timeline = Timeline(tmp_path / "my-run/timeline.jsonl")
    for event in ("the run started", "the server at tcp://<b>:1: ready → joining"):
        timeline.record(event)
    timeline.close()
    html, lines = write_report(tmp_path / "my-run").read_text(), read_metrics(tmp_path / "my-run")
    page = Page(html)
    for part in ("my-run", "60 steps", "Groups lost", "242", "clip_high = 0.28", "JavaScript"):
        assert part in page.text
    assert (
        html.index("<h2>Events (UTC)</h2>")
        < html.index("the run started")
        < html.index("tcp://&lt;b&gt;:1: ready → joining")
    )
    assert "<b>:1" not in html
    assert list(page.charts) == TITLES
    mismatch = "Mismatch of server and learner"
    for title, metric in (("Entropy", "policy/entropy"), (mismatch, "policy/mismatch_abs_logprob")):
        curve = page.charts[title]["series"][0]
        recorded = {line["step"]: line[metric] for line in lines if metric in line}
        assert curve["x"] == list(recorded)
        assert curve["y"] == pytest.approx(list(recorded.values()), rel=1e-5)
    over_time = page.charts["Reward over time"]
    assert over_time["x"] == "seconds"
    assert over_time["series"][0]["x"] == pytest.approx([line["elapsed_s"] for line in lines], rel=1e-5)
    assert [len(curve["x"]) for curve in page.charts[mismatch]["series"]] == [40, 3]
    parts = [curve["y"][7] for curve in page.charts["Time per step"]["series"]]
    assert sum(parts) == pytest.approx(lines[7]["time/step"], rel=1e-5)
    ages = page.charts["Staleness of consumed groups"]["series"][0]
    assert ages["x"] == [0, 1, 2] and sum(ages["y"]) == 240

    assert page.loads == [] and not re.findall(r"url\(|@import", html)
    assert {"link", "img", "iframe", "object"}.isdisjoint(page.tags) and len(page.ids) == len(set(page.ids))
    assert page.tags.count("script") == 2 and page.scripts[1:] == [script()]
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';" in html.replace("&#39;", "'")


def test_model_output_is_truncated_and_never_executed(tmp_path: Path) -> None:
    write_run(tmp_path, steps=3)
    hostile = ["<script>alert(1)</script>", "</td></table>", "{{ 7 * 7 }}", "nul \x00 bell \x07"]
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": "half a pair \ud83d"}]
    image = "<img src=x onerror=alert(1)>"
    long = ["x" * 5000] * (MAX_COMPLETIONS + 3)
    lines = [
        {"step": 1, "prompt": image, "answer": ["<b>", 4], "completions": hostile, "rewards": [None, -1.0, 0.0, 2.0]},
        {"step": 2, "prompt": chat, "completions": ["\u202egnp"], "rewards": [1.0]},
        {"step": 3, "prompt": "p", "completions": long, "rewards": [0.5] * len(long)},
    ]
    write_lines(tmp_path / "samples.jsonl", lines)
    page = page_of(tmp_path)
    assert page.tags.count("script") == 2 and "img" not in page.tags and "b" in page.tags
    for shown in (*hostile[:3], "nul ␀ bell ␇", "system: Think.\nuser: half a pair ?", "onerror=alert(1)"):
        assert shown in page.text
    assert "(3,800 more characters)" in page.text and "and 3 more of this group" in page.text
    assert page.text.count("x" * 1200) == MAX_COMPLETIONS


def test_the_report_of_a_run_with_one_step_lists_what_is_missing(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "time": 0.0, "elapsed_s": 1.0, "reward/mean": 0.5}])
    write_ledger(tmp_path / "ledger.db", 1, random.Random(0))
    page = page_of(tmp_path)
    for reason in ("Not shown:", "the run recorded no reference/kl", "recorded no samples.jsonl"):
        assert reason in page.text
    assert list(page.charts) == ["Reward per step", "Reward over time", "Staleness of consumed groups"]
    shown = page.text.replace(script(), "")
    assert "None" not in shown and "NaN" not in shown and "nan" not in shown


@pytest.mark.parametrize("steps", [1, 2, 60])
@pytest.mark.parametrize("value", [0.0, -3.0, 1e-12, 1e12, float("nan"), INF])
def test_constant_tiny_huge_and_broken_values_can_be_drawn(steps: int, value: float) -> None:
    rng = random.Random(0)
    metrics = [
        {name: was if name in ("step", "elapsed_s") else value for name, was in metrics_of(step, steps, rng).items()}
        for step in range(1, steps + 1)
    ]
    charts = run_charts(metrics, None, {})
    drawn = [chart for chart in charts if isinstance(chart, Chart)]
    assert all(np.isfinite([*curve.x, *curve.y, *(curve.mean or [])]).all() for one in drawn for curve in one.series)
    assert "Infinity" not in json_of(drawn) and "NaN" not in json_of(drawn)
    if not np.isfinite(value):
        assert [chart.title for chart in drawn] in ([], ["Time per step"])


def charts_of(metrics: list[dict[str, float]]) -> dict[str, Chart]:
    charts = run_charts(metrics, evaluations_of_metrics(metrics))
    return {chart.title: chart for chart in charts if isinstance(chart, Chart)}


def test_several_reward_functions_get_a_separate_chart() -> None:
    of_the_run = {"reward/mean": 0.3, "reward/turn_mean": 0.2, "reward/turn_1": 0.2}

    def charts_with(rewards: dict[str, float]) -> dict[str, Chart]:
        return charts_of([{"step": step, "elapsed_s": step} | of_the_run | rewards for step in range(1, 9)])

    charts = charts_with({"reward/close_to_20_words": 0.1, "reward/exact_match": 0.2})
    assert list(charts) == ["Reward per step", "Reward over time", "Each reward function"]
    colors = {curve.name: curve.color for curve in charts["Each reward function"].series}
    assert list(colors) == ["exact_match", "close_to_20_words"]
    of_mean, of_exact_match = (curve.color for curve in charts["Reward per step"].series)
    assert colors["exact_match"] == of_exact_match and of_mean not in colors.values(), "a color has one meaning"
    assert "Each reward function" not in charts_with({"reward/exact_match": 0.2})


def test_each_evaluation_set_has_a_curve() -> None:
    rewards = {"evaluation/easy/reward": 0.75, "evaluation/hard/reward": 0.25}
    others = {"evaluation/function/right/reward": 1.0, "evaluation/pass_at_4/reward": 1.0}
    metrics = []
    for step in range(1, 21):
        steps = dict.fromkeys(("evaluation/easy/step", "evaluation/hard/step"), 10 if step > 10 else 0)
        metrics.append({"step": step} | rewards | others | steps)
    curves = {curve.name: (curve.kind, curve.x, curve.y) for curve in charts_of(metrics)["Evaluations"].series}
    assert curves == {"easy": ("points", [0, 10], [0.75] * 2), "hard": ("points", [0, 10], [0.25] * 2)}


def test_each_refresh_of_the_reference_is_counted() -> None:
    metrics = [{"step": step, "reference/kl": 0.1, "reference/version": float(step // 10)} for step in range(1, 41)]
    (chart,) = charts_of(metrics).values()
    assert chart.notes == ["reference refreshed (4×)"] and chart.marks == [10, 20, 30, 40]


def test_a_long_run_stays_a_small_file(tmp_path: Path) -> None:
    write_run(tmp_path, steps=60)
    rng = random.Random(1)
    write_lines(tmp_path / "metrics.jsonl", [metrics_of(step, 4000, rng) for step in range(1, 4001)])
    assert write_report(tmp_path).stat().st_size < 1_000_000


@pytest.mark.parametrize("num_values", [0, 1, 2, 19, 20, 59, 60, 99, 100, 400, 401])
def test_the_moving_average_uses_only_existing_neighbors(num_values: int) -> None:
    half = max(1, num_values // 20) // 2
    values = np.random.default_rng(0).normal(size=num_values)
    for spike in (0.0, 1e18):
        if num_values:
            values[num_values // 3] += spike
        window_means = [values[max(0, i - half) : i + half + 1].mean() for i in range(num_values)]
        np.testing.assert_allclose(moving_mean(values, log=False), window_means, atol=1e-12, rtol=1e-12)
    logs = np.random.default_rng(1).normal(size=num_values)
    window_means = [logs[max(0, i - half) : i + half + 1].mean() for i in range(num_values)]
    np.testing.assert_allclose(moving_mean(np.exp(logs), log=True), np.exp(window_means), rtol=1e-12)


def test_non_finite_values_never_reach_a_page() -> None:
    rng = random.Random(0)
    lines = [{**metrics_of(step, 60, rng), "time/optimizer": INF if step in (30, 31) else 1.0} for step in range(1, 61)]
    chart = charts_of(lines)["Time per step"]
    assert "Infinity" not in json_of(chart) and all(len(curve.x) == 60 for curve in chart.series)
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_of([float("nan")])


def test_steps_beyond_a_million_keep_all_their_digits() -> None:
    metrics = [{"step": step, "reward/mean": 0.5, "evaluation/reward": 0.5, "evaluation/step": step} for step in LATE]
    metrics = msgspec.json.decode(b"[" + b",".join(encoded(line["step"], line) for line in metrics) + b"]")
    drawn = {title: chart.series[0].x for title, chart in charts_of(metrics).items()}
    assert drawn == {"Reward per step": LATE, "Evaluations": LATE}


def test_a_reduction_keeps_order_ends_and_spikes() -> None:
    y = np.random.default_rng(0).normal(size=50_000)
    y[12_345], y[43_210] = 99.0, -99.0
    kept = extremes(y)
    assert len(kept) <= MAX_POINTS and kept[0] == 0 and kept[-1] == len(y) - 1
    assert (np.diff(kept) > 0).all()
    assert y[kept].max() == 99.0 and y[kept].min() == -99.0
    assert extremes(y[:MAX_POINTS]).tolist() == list(range(MAX_POINTS))
