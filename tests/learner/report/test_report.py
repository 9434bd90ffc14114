"""The report as a file: standalone, safe against what models write, complete, and honest about what is missing."""

import base64
import hashlib
import json
import random
import re
from html.parser import HTMLParser

import msgspec
import numpy as np
import pytest

from learner.report.charts import Chart, evaluations_of_metrics, run_charts
from learner.report.history import encoded
from learner.report.page import write_report
from learner.report.sample_view import MAX_COMPLETIONS
from learner.report.series import MAX_POINTS, extremes, moving_mean
from learner.report.summary import RunDirectoryError, read_metrics
from learner.report.templates import json_of, script
from tests.learner.report.synthetic_run import metrics_of, write_ledger, write_lines, write_run

TITLES = [
    "Reward per step",
    "Reward over time",
    "Staleness of consumed groups",
    "Staleness per step",
    "KL to the reference",
    "Time per step",
    "Entropy",
    "Clipped tokens",
    "Gradient norm",
    "Completion length",
    "Truncated completions",
    "Reward deviation",
    "Loss",
    "Learning rate",
    "Idle time",
    "Weight sync time",
    "Mismatch of server and learner",
]


INF = float("inf")
LATE = [1_000_001.0, 1_000_002.0, 1_000_003.0]


class Page(HTMLParser):
    """What a browser would see of the page: its tags, its ids, what it would load, its scripts, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "srcset", "action") or name.startswith("on"):
                self.loads.append(value)

    def handle_data(self, data):
        if self.lasttag == "script" and data.strip():
            self.scripts.append(data)
        self.text += data

    @property
    def charts(self):
        """What the script draws, by title."""
        return {chart["title"]: chart for chart in json.loads(self.scripts[0])}


def page_of(run_dir) -> Page:
    return Page(write_report(run_dir).read_text())


def test_the_page_shows_every_chart_and_the_headline_numbers(tmp_path):
    write_run(tmp_path / "my-run", steps=60)
    page = page_of(tmp_path / "my-run")
    assert list(page.charts) == TITLES
    for told in (
        "my-run",
        "60 steps",
        "Groups lost",
        "242",
        "admitted",
        "outstanding",
        "clip_high = 0.28",
        "need JavaScript",
    ):
        assert told in page.text


def test_the_page_needs_nothing_from_outside_and_runs_no_script_but_ours(tmp_path):
    write_run(tmp_path, steps=40)
    html = write_report(tmp_path).read_text()
    page = Page(html)
    assert page.loads == []
    assert {"link", "img", "iframe", "object"}.isdisjoint(page.tags) and page.tags.count("script") == 2
    assert page.scripts[1:] == [script()]
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    assert (
        f"default-src &#39;none&#39;; style-src &#39;unsafe-inline&#39;; script-src &#39;sha256-{digest}&#39;;" in html
    )
    assert not re.findall(r"url\(|@import", html)
    assert len(page.ids) == len(set(page.ids))


def test_the_charts_of_the_page_have_the_values_of_the_metrics(tmp_path):
    write_run(tmp_path, steps=60)
    lines, charts = read_metrics(tmp_path), page_of(tmp_path).charts
    for title, metric in (
        ("Entropy", "policy/entropy"),
        ("Loss", "loss/policy"),
        ("Learning rate", "optim/lr"),
        ("Mismatch of server and learner", "policy/mismatch_abs_logprob"),
    ):
        curve = charts[title]["series"][0]
        recorded = {line["step"]: line[metric] for line in lines if metric in line}
        assert curve["x"] == list(recorded)
        assert curve["y"] == pytest.approx(list(recorded.values()), rel=1e-5)
    over_time = charts["Reward over time"]
    assert over_time["x"] == "seconds"
    assert over_time["series"][0]["x"] == pytest.approx([line["elapsed_s"] for line in lines], rel=1e-5)
    assert [len(curve["x"]) for curve in charts["Mismatch of server and learner"]["series"]] == [40, 3]
    parts = {curve["name"]: curve["y"] for curve in charts["Time per step"]["series"]}
    assert sum(values[7] for values in parts.values()) == pytest.approx(lines[7]["time/step"], rel=1e-5)
    ages = charts["Staleness of consumed groups"]["series"][0]
    assert ages["x"] == [0, 1, 2] and sum(ages["y"]) == 240


def test_what_a_model_wrote_is_shown_and_never_run(tmp_path):
    write_run(tmp_path, steps=3)
    hostile = [
        "<script>alert(1)</script>",
        "</td></table>",
        "{{ 7 * 7 }}",
        "nul \x00 bell \x07",
        "half a pair \ud83d",
        "\u202egnp",
    ]
    row = {"prompt": "<img src=x onerror=alert(1)>", "answer": ["<b>", 4]}
    halves = (hostile[:3], [None, -1.0, 0.0]), (hostile[3:], [1.0, 2.0, 0.5])
    lines = [
        row | {"step": i, "completions": texts, "rewards": rewards} for i, (texts, rewards) in enumerate(halves, 1)
    ]
    write_lines(tmp_path / "samples.jsonl", lines)
    page = page_of(tmp_path)
    assert page.tags.count("script") == 2 and "img" not in page.tags and "b" in page.tags
    for shown in (
        "<script>alert(1)</script>",
        "</td></table>",
        "{{ 7 * 7 }}",
        "nul ␀ bell ␇",
        "half a pair ?",
        "onerror=alert(1)",
    ):
        assert shown in page.text


def test_a_chat_prompt_is_shown_as_its_turns(tmp_path):
    write_run(tmp_path, steps=3)
    chat = [{"role": "system", "content": "Think."}, {"role": "user", "content": "2 + 2?"}]
    write_lines(tmp_path / "samples.jsonl", [{"step": 1, "prompt": chat, "completions": ["4"], "rewards": [1.0]}])
    assert "system: Think.\nuser: 2 + 2?" in page_of(tmp_path).text


def test_long_completions_and_large_groups_are_cut_and_say_so(tmp_path):
    write_run(tmp_path, steps=3)
    texts = ["x" * 5000] * (MAX_COMPLETIONS + 3)
    write_lines(
        tmp_path / "samples.jsonl", [{"step": 1, "prompt": "p", "completions": texts, "rewards": [0.5] * len(texts)}]
    )
    text = page_of(tmp_path).text
    assert "(3,800 more characters)" in text
    assert "and 3 more of this group" in text
    assert text.count("x" * 1200) == MAX_COMPLETIONS


def test_a_bare_run_of_one_step_gets_a_page_that_says_what_is_left_out(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "time": 0.0, "elapsed_s": 1.0, "reward/mean": 0.5}])
    write_ledger(tmp_path / "ledger.db", 1, random.Random(0))
    page = page_of(tmp_path)
    assert "Not shown:" in page.text
    assert "the run recorded no reference/kl" in page.text
    assert "recorded no samples.jsonl" in page.text
    assert list(page.charts) == ["Reward per step", "Reward over time", "Staleness of consumed groups"]
    shown = page.text.replace(script(), "")
    assert "None" not in shown and "NaN" not in shown and "nan" not in shown


@pytest.mark.parametrize("steps", [1, 2, 3, 30, 60])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-12, 1e12, float("nan"), float("inf")])
def test_constant_tiny_huge_and_broken_values_can_be_drawn(steps, value):
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


def test_several_reward_functions_get_a_chart_of_their_own():
    metrics = [
        {"step": step, "elapsed_s": step, "reward/a": 0.1, "reward/b": 0.2, "reward/mean": 0.3} for step in range(1, 9)
    ]
    titles = [chart.title for chart in run_charts(metrics, None, {}) if isinstance(chart, Chart)]
    assert titles == ["Reward per step", "Reward over time", "Each reward function"]


def test_each_refresh_of_the_reference_is_counted(tmp_path):
    metrics = [{"step": step, "reference/kl": 0.1, "reference/version": float(step // 10)} for step in range(1, 41)]
    (chart,) = (chart for chart in run_charts(metrics, None, {}) if isinstance(chart, Chart))
    assert chart.notes == ["reference refreshed (4×)"] and chart.marks == [10, 20, 30, 40]


def test_a_long_run_stays_a_small_file(tmp_path):
    write_run(tmp_path, steps=60)
    rng = random.Random(1)
    write_lines(tmp_path / "metrics.jsonl", [metrics_of(step, 20_000, rng) for step in range(1, 20_001)])
    assert write_report(tmp_path).stat().st_size < 1_000_000


def test_the_moving_mean_is_the_mean_of_the_neighbours_there_are():
    values = np.random.default_rng(0).normal(size=100)
    window_means = [values[max(0, i - 2) : i + 3].mean() for i in range(100)]
    np.testing.assert_allclose(moving_mean(values, log=False), window_means, atol=1e-12)
    positive = np.exp(values)
    np.testing.assert_allclose(moving_mean(positive, log=True), np.exp(window_means), rtol=1e-12)


@pytest.mark.parametrize("num_values", [0, 1, 2, 19, 20, 59, 60, 99, 100, 400, 401])
def test_a_spike_changes_the_moving_mean_only_near_itself(num_values):
    half = max(1, num_values // 20) // 2
    values = np.ones(num_values)
    if num_values:
        values[num_values // 3] = 1e18
    window_means = [values[max(0, i - half) : i + half + 1].mean() for i in range(num_values)]
    np.testing.assert_allclose(moving_mean(values, log=False), window_means, rtol=1e-12)


def test_what_is_not_finite_never_reaches_a_page():
    rng = random.Random(0)
    lines = [{**metrics_of(step, 60, rng), "time/optimizer": INF if step in (30, 31) else 1.0} for step in range(1, 61)]
    (chart,) = (one for one in run_charts(lines, None) if one.title == "Time per step")
    assert "Infinity" not in json_of(chart) and all(len(curve.x) == 60 for curve in chart.series)
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_of([float("nan")])


def test_steps_beyond_a_million_keep_all_their_digits():
    metrics = [{"step": step, "reward/mean": 0.5, "evaluation/reward": 0.5, "evaluation/step": step} for step in LATE]
    metrics = msgspec.json.decode(b"[" + b",".join(encoded(line["step"], line) for line in metrics) + b"]")
    charts = run_charts(metrics, evaluations_of_metrics(metrics))
    drawn = {chart.title: chart.series[0].x for chart in charts if isinstance(chart, Chart)}
    assert drawn == {"Reward per step": LATE, "Evaluations": LATE}


def test_a_reduction_keeps_order_ends_and_spikes():
    y = np.random.default_rng(0).normal(size=50_000)
    y[12_345], y[43_210] = 99.0, -99.0
    kept = extremes(y)
    assert len(kept) <= MAX_POINTS and kept[0] == 0 and kept[-1] == len(y) - 1
    assert (np.diff(kept) > 0).all()
    assert y[kept].max() == 99.0 and y[kept].min() == -99.0
    assert extremes(y[:MAX_POINTS]).tolist() == list(range(MAX_POINTS))


def test_a_directory_that_is_no_run_gets_no_report(tmp_path):
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
