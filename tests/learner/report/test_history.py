"""The dashboard's history of a long run: read beside it, thinned, and never a reason to stop it."""

import asyncio
import json
import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import learner.report.dashboard
from learner.config import ReportConfig
from learner.controller import start_dashboard
from learner.report.dashboard import Dashboard
from learner.report.history import MAX_POINTS, History, read_history
from learner.servers.loop_thread import LoopThread
from learner.storage.files import JsonLinesFile, last_line
from learner.storage.run_dir import RunDir
from tests.learner.report.synthetic_run import write_lines
from tests.learner.runs import make_run
from tests.ports import free_port


def points_of(history: History) -> list[dict[str, Any]]:
    return json.loads(history.event().split(b"data: ")[1])


def test_a_history_that_is_read_is_the_one_that_was_watched(tmp_path: Path) -> None:
    path, watched = tmp_path / "metrics.jsonl", History()
    steps = [*range(1, 3001), *range(2501, 4206), *range(4200, 4321)]  # two resumes took steps back
    lines = [{"step": step, "time": 1.5, "reward/mean": place / 7} for place, step in enumerate(steps)]
    write_lines(path, lines)
    with path.open("a") as file:
        file.write('{"step": 4321, "time"')  # and a kill cut the last line
    for line in lines:
        watched.add(line["step"], line)
    found = read_history(path, lambda: False)
    assert found.newest_step == 4320 and len(points_of(found)) <= MAX_POINTS
    assert [point["step"] for point in points_of(found)] == [point["step"] for point in points_of(watched)]
    assert all(place in points_of(watched) for place in points_of(found))
    for history in (found, watched):
        history.add(4321, {"reward/mean": 1.0})
    assert points_of(found) == points_of(watched)


def test_a_dashboard_is_there_before_its_history_and_keeps_what_comes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "reward/mean": 0.0} for step in (1, 2, 3)])
    may_read = threading.Event()

    def slow(path: Path, give_up: Any) -> History:
        assert may_read.wait(30)
        return read_history(path, give_up)

    monkeypatch.setattr(learner.report.dashboard, "read_history", slow)

    async def scene() -> list[dict[str, Any]]:
        dashboard = await Dashboard.start(tmp_path, 0)
        dashboard.publish(3, {"reward/mean": 1.0})
        dashboard.publish(4, {"reward/mean": 1.0})
        await asyncio.sleep(0)
        may_read.set()
        await asyncio.wait_for(dashboard._is_loaded.wait(), 30)
        await dashboard.close()
        return points_of(dashboard._history)

    points = asyncio.run(scene())
    assert [(point["step"], point["reward/mean"]) for point in points] == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_a_history_that_takes_too_long_costs_a_line_and_the_earlier_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_lines(tmp_path / "metrics.jsonl", [{"step": step} for step in range(1, 2000)])
    monkeypatch.setattr(learner.report.dashboard, "HISTORY_TIMEOUT_S", 0.0)

    async def scene() -> int:
        dashboard = await Dashboard.start(tmp_path, 0)
        await asyncio.wait_for(dashboard._is_loaded.wait(), 30)
        await dashboard.close()
        return dashboard._history.newest_step

    assert asyncio.run(scene()) == 0
    assert "begins without the earlier steps" in caplog.text and "in time" in caplog.text


def test_a_dashboard_that_cannot_start_is_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text("this is no TOML")
    run_dir, loop = RunDir(tmp_path / "run", make_run(tmp_path, "tcp://127.0.0.1:1")), LoopThread("test")
    try:
        with caplog.at_level(logging.WARNING), ExitStack() as cleanup:
            assert start_dashboard(loop, run_dir, ReportConfig(), cleanup) is None
    finally:
        loop.stop()
        run_dir.close()
    assert "goes on without a live dashboard" in caplog.text


@pytest.mark.parametrize(("host", "is_told"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_dashboard_that_others_reach_says_what_they_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, is_told: bool
) -> None:
    loop = LoopThread("test")
    with caplog.at_level(logging.WARNING), ExitStack() as cleanup:
        cleanup.callback(loop.stop)
        dashboard = start_dashboard(
            loop, tmp_path, ReportConfig(dashboard_host=host, dashboard_port=free_port()), cleanup
        )
        assert dashboard is not None and dashboard.address.startswith(f"http://{host}:")
    assert ("can read the run's metrics, prompts and completions" in caplog.text) is is_told


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
