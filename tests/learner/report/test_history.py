"""The dashboard's history of a long run: read in the background, thinned, and never a reason to stop the run."""

import asyncio
import json
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import learner.report.dashboard
from learner.report.charts import Chart, kl_chart, time_chart
from learner.report.dashboard import Dashboard
from learner.report.history import MAX_POINTS, History, read_history
from learner.storage.files import JsonLinesFile, last_line
from tests.learner.report.synthetic_run import write_lines


def points_of(history: History) -> list[dict[str, Any]]:
    return json.loads(history.points())


def test_the_history_read_from_disk_equals_the_live_history(tmp_path: Path) -> None:
    path, watched = tmp_path / "metrics.jsonl", History()
    steps = [*range(1, 3001), *range(2501, 4206), *range(4200, 4321)]  # two resumes repeated steps
    lines = [{"step": step, "time": 1.5, "reward/mean": i / 7} for i, step in enumerate(steps)]
    write_lines(path, lines)
    with path.open("a") as file:
        file.write('{"step": 4321, "time"')  # a kill truncated the last line
    for line in lines:
        watched.add(line["step"], line)
    found = read_history(path, lambda: False)
    kept = [point["step"] for point in points_of(found)]
    assert MAX_POINTS // 2 <= len(kept) <= MAX_POINTS and (kept[0], kept[-1]) == (1, 4320)
    gaps = {later - earlier for earlier, later in pairwise(kept[:-1])}
    assert len(gaps) <= 3 and max(gaps) < 2 * 4320 / len(kept), "points are thinned evenly"
    assert kept == [point["step"] for point in points_of(watched)]
    assert all(point in points_of(watched) for point in points_of(found))
    assert found.event() == watched.event()
    sent = [point["step"] for point in json.loads(found.event().removeprefix(b"event: history\ndata: "))]
    assert sent[-10:] == list(range(4311, 4321)) and sorted(sent) == sent and set(kept) < set(sent)
    for history in (found, watched):
        history.add(4321, {"reward/mean": 1.0})
    assert points_of(found) == points_of(watched)


@pytest.mark.parametrize("every", [50, 64, 100])
def test_rare_long_steps_keep_their_share_of_a_long_run(every: int) -> None:
    history, lines = History(), []
    for step in range(1, 5001):
        refreshed = float(step - step % 8)
        line = {"time/step": 2.0, "time/wait_for_batch": 2.0, "reference/kl": 0.1, "reference/version": refreshed}
        if step > 1 and (step - 1) % every == 0:
            line |= {"time/step": 12.0, "time/checkpoint": 10.0}
        lines.append({"step": step, **line})
        history.add(step, line)
    checkpoint_s = 10.0 * sum("time/checkpoint" in line for line in lines)
    expected = checkpoint_s / (checkpoint_s + 2.0 * len(lines))
    for metrics in (lines, points_of(history)):
        chart = time_chart(metrics)
        assert isinstance(chart, Chart)
        (share,) = (part.rest for part in chart.series if part.name == "checkpoint")
        assert int((share or "").removesuffix("%")) / 100 == pytest.approx(expected, abs=0.02)
    charts = [kl_chart(metrics) for metrics in (lines, points_of(history))]
    assert [chart.notes for chart in charts if isinstance(chart, Chart)] == [
        ["reference refreshed (625×)"], ["reference refreshed"]
    ]  # fmt: skip


def test_non_finite_values_are_null_for_the_page() -> None:
    point = json.loads(History().add(1, {"a": float("nan"), "b": float("inf"), "c": 1 / 3}))
    assert point == {"a": None, "b": None, "c": 0.333333, "step": 1}


async def loaded(run_dir: Path, *published: int) -> list[dict[str, Any]]:
    """Return the points of a dashboard that received these steps before it read its history."""
    dashboard = await Dashboard.start(run_dir, 0)
    for step in published:
        dashboard.publish(step, {"reward/mean": 1.0})
    await asyncio.wait_for(dashboard._is_loaded.wait(), 60)
    await dashboard.close()
    return points_of(dashboard._history)


def test_a_dashboard_starts_before_its_history_is_read_and_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "reward/mean": 0.0} for step in (1, 2, 3)])
    is_published, add = threading.Event(), History.add

    def watched(history: History, step: int, metrics: Any) -> bytes:
        if step == 4:
            is_published.set()
        return add(history, step, metrics)

    def slow(path: Path, give_up: Any) -> History:
        assert is_published.wait(60)
        return read_history(path, give_up)

    monkeypatch.setattr(History, "add", watched)
    monkeypatch.setattr(learner.report.dashboard, "read_history", slow)
    points = asyncio.run(loaded(tmp_path, 3, 4))
    assert [(point["step"], point["reward/mean"]) for point in points] == [(1, 0), (2, 0), (3, 1), (4, 1)]


@pytest.mark.parametrize(("timeout_s", "broken", "reason"), [(30.0, "nonsense\n", "line 2000"), (0.0, "", "in time")])
def test_an_unreadable_history_is_logged_and_only_its_steps_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    timeout_s: float, broken: str, reason: str,
) -> None:  # fmt: skip
    write_lines(tmp_path / "metrics.jsonl", [{"step": step} for step in range(1, 2000)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(broken)
    monkeypatch.setattr(learner.report.dashboard, "HISTORY_TIMEOUT_S", timeout_s)
    assert asyncio.run(loaded(tmp_path)) == []
    assert "begins without the earlier steps" in caplog.text and reason in caplog.text


@pytest.mark.parametrize("num_bytes", [0, 10, 1 << 16, 200_000])
def test_the_end_of_a_long_file_is_found_from_its_end(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "lines.jsonl"
    long = json.dumps({"step": 1, "text": "x" * num_bytes})
    path.write_text(f"{long}\n{long}\n" + "torn" * (num_bytes // 4))
    lines = JsonLinesFile(path)
    assert last_line(path) == long.encode()
    lines.append({"step": 2})
    lines.close()
    assert last_line(path) == b'{"step": 2}'
    assert path.read_text() == f'{long}\n{long}\n{{"step": 2}}\n'
    path.write_text("torn" * num_bytes)
    JsonLinesFile(path).close()
    assert path.read_text() == "" and last_line(path) == b""
