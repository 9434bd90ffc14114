"""The report as a file: standalone, safe against what models write, complete, and honest about what is missing."""

import random
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from learner.report.charts import Absent, Chart, draw_charts
from learner.report.drawing import MAX_POINTS, duration, moving_mean, percent, plain, thinned, tiny
from learner.report.page import write_report
from learner.report.sample_view import MAX_COMPLETIONS
from learner.report.summary import RunDirectoryError
from tests.learner.report.synthetic_run import metrics_of, write_ledger, write_lines, write_run

TITLES = [
    "Reward per step",
    "Reward over time",
    "How old the groups were",
    "Distance to the reference",
    "Entropy of the policy",
    "Tokens held by the clip",
    "Where a step's time goes",
    "Who waited",
    "What a push costs",
    "Server against learner",
]


class Page(HTMLParser):
    """What a browser would see of the page: its tags, its ids, what it would load, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
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
        self.text += data


def page_of(run_dir) -> Page:
    return Page(write_report(run_dir).read_text())


def test_the_page_shows_every_chart_and_the_headline_numbers(tmp_path):
    write_run(tmp_path / "my-run", steps=60)
    page = page_of(tmp_path / "my-run")
    for title in TITLES:
        assert title in page.text
    assert page.tags.count("svg") == 16
    for told in (
        "my-run",
        "60 steps",
        "Groups lost",
        "242",
        "admitted",
        "outstanding",
        "clip_high = 0.28",
        "At the end",
    ):
        assert told in page.text


def test_the_page_needs_nothing_from_outside_and_runs_no_script(tmp_path):
    write_run(tmp_path, steps=40)
    html = write_report(tmp_path).read_text()
    page = Page(html)
    assert all(target.startswith("#") for target in page.loads)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(page.tags)
    assert "default-src 'none'" in html
    assert not re.findall(r"url\((?!#)", html)
    assert len(page.ids) == len(set(page.ids)), "no id is used by two charts"
    assert "#0a0b0" not in html, "every placeholder colour became a variable"


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
    assert "script" not in page.tags and "img" not in page.tags and "b" in page.tags
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
    assert "Left out:" in page.text
    assert "the run recorded no reference/kl" in page.text
    assert "recorded no samples.jsonl" in page.text
    assert page.tags.count("svg") == 3
    assert "None" not in page.text and "nan" not in page.text


@pytest.mark.parametrize("steps", [1, 2, 3, 30])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-12, 1e12, float("nan"), float("inf")])
def test_constant_tiny_huge_and_broken_values_can_be_drawn(steps, value):
    rng = random.Random(0)
    metrics = [
        {name: was if name in ("step", "elapsed_s") else value for name, was in metrics_of(step, steps, rng).items()}
        for step in range(1, steps + 1)
    ]
    charts = draw_charts(metrics, {})
    assert all(isinstance(chart, Chart | Absent) for chart in charts)
    if not np.isfinite(value):
        assert not any(isinstance(chart, Chart) and chart.title != "Where a step's time goes" for chart in charts)


def test_several_reward_functions_get_a_chart_of_their_own():
    metrics = [
        {"step": step, "elapsed_s": step, "reward/a": 0.1, "reward/b": 0.2, "reward/mean": 0.3} for step in range(1, 9)
    ]
    titles = [chart.title for chart in draw_charts(metrics, {}) if isinstance(chart, Chart)]
    assert titles == ["Reward per step", "Reward over time", "Each reward function"]


def test_each_refresh_of_the_reference_is_counted(tmp_path):
    metrics = [{"step": step, "reference/kl": 0.1, "reference/version": float(step // 10)} for step in range(1, 41)]
    (chart,) = (chart for chart in draw_charts(metrics, {}) if isinstance(chart, Chart))
    assert chart.legend == [("var(--amber)", "reference refreshed (4×)")]


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


def test_thinning_keeps_order_ends_and_spikes():
    x, y = np.arange(50_000.0), np.random.default_rng(0).normal(size=50_000)
    y[12_345], y[43_210] = 99.0, -99.0
    kept_x, kept_y = thinned(x, y)
    assert len(kept_x) <= MAX_POINTS
    assert (np.diff(kept_x) > 0).all()
    assert kept_y.max() == 99.0 and kept_y.min() == -99.0


def test_values_are_told_in_few_characters():
    assert [plain(value) for value in (0, 0.5, 1.25, 42.1, 12345, 0.0012)] == [
        "0",
        "0.5",
        "1.25",
        "42",
        "12,345",
        "0.001",
    ]
    assert [percent(value) for value in (0, 0.013, 0.5, 1)] == ["0 %", "1.3 %", "50 %", "100 %"]
    assert [duration(value) for value in (0, 0.065, 1.5, 90)] == ["0 s", "65 ms", "1.5 s", "90 s"]
    assert [tiny(value) for value in (0, 4.2e-7)] == ["0", "4e-7"]


def test_a_directory_that_is_no_run_gets_no_report(tmp_path):
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
