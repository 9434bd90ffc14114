"""Comparison of several runs: their numbers, the keys that differ, and a standalone page."""

import json
from pathlib import Path

import pytest

from learner.report.page import compare, comparison_text, write_comparison
from learner.report.series import series
from learner.report.summary import RunDirectoryError, read_metrics, summarize
from learner.report.templates import script
from tests.learner.in_process import run_here
from tests.learner.report.pages import Page
from tests.learner.report.synthetic_run import write_lines, write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Return two runs that differ in one key and in one extra key."""
    paths = [tmp_path / "with-care", tmp_path / "bold"]
    for seed, path in enumerate(paths):
        write_run(path, steps=40 + 20 * seed, seed=seed)
    config = (paths[1] / "config.toml").read_text().replace("clip_high = 0.28", "clip_high = 0.281\nkind = 'new'")
    (paths[1] / "config.toml").write_text(config)
    return paths


def test_each_run_has_its_numbers_and_only_differing_keys_are_reported(runs: list[Path]) -> None:
    comparison, metrics = compare(runs)
    assert [run.name for run in comparison.runs] == ["with-care", "bold"]
    assert [run.summary for run in comparison.runs] == [summarize(path) for path in runs]
    assert comparison.differences == {"learner.loss.clip_high": [0.28, 0.281], "learner.loss.kind": [None, "new"]}
    rows = {line.split("  ")[0]: line.split()[-2:] for line in comparison_text(comparison).splitlines() if line.strip()}
    assert rows["steps"] == ["40", "60"] and rows["learner.loss.kind"] == ["–", "new"]
    assert rows["learner.loss.clip_high"] == ["0.28", "0.281"]
    assert [len(lines) for lines in metrics] == [40, 60]


def test_infinity_in_a_config_is_no_default_in_json(runs: list[Path]) -> None:
    config = (runs[1] / "config.toml").read_text().replace("clip_high = 0.281", "clip_high = 0.28\ndual_clip = inf")
    (runs[1] / "config.toml").write_text(config)
    comparison = json.loads(run_here("report", *map(str, runs), "--json").stdout)
    assert comparison["differences"] == {"learner.loss.dual_clip": [None, "inf"], "learner.loss.kind": [None, "new"]}


def test_the_page_is_standalone_and_shows_both_runs_in_every_chart(runs: list[Path]) -> None:
    path = write_comparison(*compare(runs))
    assert path == runs[0].parent / "comparison.html"
    page = Page(path.read_text())
    titles = ["Reward per step", "Reward over time", "Entropy", "Completion length", "Clipped tokens"]
    assert list(page.charts) == titles, "these runs have neither evaluations nor throughput"
    for chart in page.charts.values():
        assert [curve["name"] for curve in chart["series"]] == ["with-care", "bold"]
    for curve, run in zip(page.charts["Entropy"]["series"], runs, strict=True):
        assert curve["y"] == pytest.approx([line["policy/entropy"] for line in read_metrics(run)], rel=1e-5)
    assert "learner.loss.clip_high" in page.text
    assert page.loads == [] and page.scripts[1:] == [script()]
    assert {"link", "img", "iframe"}.isdisjoint(page.tags) and len(page.ids) == len(set(page.ids))


def test_evaluations_are_points_at_their_steps(runs: list[Path]) -> None:
    for path, last in zip(runs, (0.5, 0.75), strict=True):
        lines = [line | {"evaluation/reward": 0.25, "evaluation/step": 0} for line in read_metrics(path)]
        lines[-1] |= {"evaluation/reward": last, "evaluation/step": len(lines) - 1}  # far from the moving average
        write_lines(path / "metrics.jsonl", lines)
        timed = [line | {"evaluation/seconds": 1.0} for line in lines]
        assert len(series(timed, "evaluation/seconds", "step")[0]) == len(lines)
    curves = Page(write_comparison(*compare(runs)).read_text()).charts["Evaluations"]["series"]
    assert [(curve["name"], curve["kind"]) for curve in curves] == [("with-care", "points"), ("bold", "points")]
    assert [curve["y"] for curve in curves] == [[0.25, 0.5], [0.25, 0.75]]


def test_runs_with_the_same_name_are_distinguished_by_their_paths(runs: list[Path], tmp_path: Path) -> None:
    write_run(other := tmp_path / "elsewhere/bold", steps=5)
    comparison, _ = compare([runs[1], other])
    assert [run.name for run in comparison.runs] == [str(runs[1]), str(other)]


def test_runs_that_cannot_be_compared_are_errors(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="bold is given more than once"):
        compare([*runs, runs[1]])
    with pytest.raises(RunDirectoryError, match="13 runs cannot be compared in one report; select at most 12"):
        compare([tmp_path / str(i) for i in range(13)])
    (runs[0] / "config.toml").write_text("= 3")
    with pytest.raises(RunDirectoryError, match=r"config\.toml cannot be read .* the configs cannot be compared"):
        compare(runs)


def test_the_command_compares_the_given_runs(runs: list[Path]) -> None:
    done = run_here("report", *map(str, runs))
    assert done.returncode == 0 and "comparison: " in done.stdout, done.stderr
    output = json.loads(run_here("report", str(runs[0]), "--json", str(runs[1])).stdout)
    assert [run["summary"]["steps"] for run in output["runs"]] == [40, 60]
    refused = run_here("report", *map(str, runs), "--bogus")
    assert refused.returncode == 2 and "unrecognized arguments: --bogus; see slipstream report --help" in refused.stderr
