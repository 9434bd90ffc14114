"""The live dashboard over real sockets: pages, slow pages, Prometheus; and it never slows or stops a run."""

import asyncio
import json
import logging
import math
import re
import socket
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from learner.config import ReportConfig
from learner.report import history
from learner.report.dashboard import CLIENT_BACKLOG, Dashboard, start_dashboard
from learner.report.history import History, LiveCharts
from learner.servers.loop_thread import LoopThread
from tests.learner.report.pages import NUM_STEPS, next_event, observed, text_at
from tests.learner.report.synthetic_run import write_lines, write_run
from tests.ports import free_port

LINE = {"reward/mean": 0.5, "reward/std": 0.1, "staleness/mean": 1.0, "time": 1_790_000_000.25}
Session = aiohttp.ClientSession


def test_a_page_receives_the_history_and_then_each_step_until_the_end(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", steps=7)

    async def look(dashboard: Dashboard, session: Session) -> None:
        async with session.get("/events") as response:
            assert response.content_type == "text/event-stream"
            name, points = await next_event(response)
            assert name == "history"
            assert [point["step"] for point in points] == [1, 2, 3, 4, 5, 6, 7]
            assert abs(points[3]["reward/mean"] - lines[3]["reward/mean"]) < 1e-5
            for step in (8, 9):
                dashboard.publish(step, LINE | {"reward/mean": step / 10})
            shown = {name: value for name, value in LINE.items() if name != "time"}
            assert await next_event(response) == ("", shown | {"step": 8, "reward/mean": 0.8})
            assert (await next_event(response))[1]["step"] == 9
            async with session.get("/events") as later:
                assert [point["step"] for point in (await next_event(later))[1]] == list(range(1, 10))
                await asyncio.wait_for(dashboard.close(), 60)
                assert await next_event(response) == await next_event(later) == ("", None)

    observed(tmp_path / "run", look)


def test_a_page_receives_the_newest_completions(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    first = {"step": 1, "prompt": "1>", "completions": ["1"], "rewards": [1.0]}
    last = {"step": 11, "prompt": "37,45>", "completions": ["82", "…"], "rewards": [1.0, None], "answer": "<b>82</b>"}

    async def look(dashboard: Dashboard, session: Session) -> str:
        for content in (None, "nonsense\n"):
            if content is not None:
                path.write_text(content)
            async with session.get("/completions") as response:
                assert response.status == 204, "a broken sample affects only its panel"
        write_lines(path, [first, last])
        with path.open("a") as file:
            file.write('{"step": 21, "prompt": "cut o')
        return await text_at(session, "/completions")

    table = observed(tmp_path, look)
    assert table.index(">11</td>") < table.index(">1</td>"), "the newest first"
    assert table.count('<tr class="completion">') == 3
    assert '<span class="reward t10">1.00</span>' in table and '<span class="reward none">–</span>' in table
    assert "&lt;b&gt;82&lt;/b&gt;" in table and "<b>" not in table
    assert "style=" not in table, "the page's content policy would reject it"


def test_the_charts_follow_each_step_and_are_built_once_for_all_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = write_run(tmp_path / "run", steps=7)
    made, encode = [], history.encoded_charts
    monkeypatch.setattr(history, "encoded_charts", lambda points: made.append(points) or encode(points))

    async def look(dashboard: Dashboard, session: Session) -> list[Any]:
        found = []
        for step in (8, 9):
            answers = await asyncio.gather(*(text_at(session, "/charts") for _ in range(20)))
            assert len(set(answers)) == 1
            found.append({chart["title"]: chart["series"][0] for chart in json.loads(answers[0])})
            dashboard.publish(step, {**lines[0], "policy/entropy": float(step)})
        return found

    for count, charts in enumerate(observed(tmp_path / "run", look), start=7):
        recorded = [line["policy/entropy"] for line in lines] + [8.0] * (count - 7)
        assert charts["Entropy"]["x"] == list(range(1, count + 1))
        assert charts["Entropy"]["y"] == pytest.approx(recorded, rel=1e-5)
    assert len(made) == 2


def test_charts_that_failed_are_built_at_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    run, is_broken = History(), iter([True, False])
    run.add(1, LINE)

    def broken_once(points: bytes) -> bytes:
        if next(is_broken):
            raise RuntimeError("broken")
        return b"[]"

    monkeypatch.setattr(history, "encoded_charts", broken_once)

    async def scene() -> bytes:
        charts = LiveCharts(lambda: run)
        with pytest.raises(RuntimeError, match="broken"):
            await charts.newest()
        return await charts.newest()

    assert asyncio.run(scene()) == b"[]"


def test_a_client_that_does_not_read_is_dropped_before_it_costs_memory(tmp_path: Path) -> None:
    async def look(dashboard: Dashboard, session: Session) -> None:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(("127.0.0.1", int(dashboard.address.rsplit(":", 1)[1])))
            slow.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            async with session.get("/events") as reading:
                await next_event(reading)
                while len(dashboard._clients) < 2:
                    await asyncio.sleep(0.01)
                metrics = {f"area/metric_{i}": i / 7 for i in range(100)}
                tracemalloc.start()
                before = tracemalloc.get_traced_memory()[0]
                for step in range(1, 3001):
                    dashboard.publish(step, metrics)
                    assert (await next_event(reading))[1]["step"] == step
                grown = tracemalloc.get_traced_memory()[0] - before
                tracemalloc.stop()
                assert len(dashboard._clients) == 1, "only the slow client is dropped"
                assert next(iter(dashboard._clients)).queue.qsize() <= CLIENT_BACKLOG
                assert grown < 3e6, "3,000 steps of 2 kB were published; only the thinned history may stay"

    observed(tmp_path, look)


def test_a_port_in_use_is_replaced_with_a_warning_that_names_port_and_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def look(dashboard: Dashboard, session: Session) -> None:
        port = int(dashboard.address.rsplit(":", 1)[1])
        with caplog.at_level(logging.WARNING):
            second = await Dashboard.start(tmp_path, port)
        try:
            assert second.address not in ("", dashboard.address)
            assert str(port) in caplog.text and "learner.report.dashboard_port" in caplog.text
            assert json.loads(await text_at(session, f"{second.address}/health"))["status"] == "ok"
        finally:
            await second.close()

    observed(tmp_path, look)


def test_prometheus_receives_the_newest_step_under_valid_names(tmp_path: Path) -> None:
    line = {
        "reward/mean": 0.25,
        "reward/it's-<b>right\n": 0.75,
        "reward/a.b": 1.0,
        "reward/a-b": 2.0,
        "loss/policy": float("nan"),
    }

    async def look(dashboard: Dashboard, session: Session) -> list[Any]:
        assert "slipstream_step 0.0" in await text_at(session, "/metrics")
        dashboard.publish(1, {"reward/mean": 0.0, "old/metric": 1.0})
        dashboard.publish(2, line)
        async with session.get("/metrics") as response:
            assert response.content_type == "text/plain"
            families = list(text_string_to_metric_families(await response.text()))
        assert json.loads(await text_at(session, "/health")) == {"status": "ok", "step": 2}
        return families

    families = observed(tmp_path, look)
    value_of = {sample.name: sample.value for family in families for sample in family.samples}
    assert math.isnan(value_of.pop("slipstream_loss_policy"))
    assert value_of == {
        "slipstream_step": 2.0,
        "slipstream_reward_mean": 0.25,
        "slipstream_reward_it_s__b_right_": 0.75,
        "slipstream_reward_a_b": 1.0,
        "slipstream_reward_a_b_": 2.0,
    }
    assert {family.type for family in families} == {"gauge"}


def test_the_page_loads_nothing_and_its_policy_allows_only_its_own_script(tmp_path: Path) -> None:
    run_dir = tmp_path / "a<script>alert(1)<"
    write_run(run_dir, steps=1)

    async def look(dashboard: Dashboard, session: Session) -> tuple[str, str]:
        other = await text_at(session, "/")
        async with session.get("/") as response:
            page = await response.text()
            assert page != other, "every response has a new nonce"
            return page, response.headers["Content-Security-Policy"]

    page, policy = observed(run_dir, look)
    assert f'data-steps="{NUM_STEPS}"' in page
    assert re.findall(r"""(?:src|href|action|srcset)\s*=\s*["']?([^"'\s>]*)""", page) == ["/metrics"]
    assert set(re.findall(r"https?://[^\"'\s]*", page)) == {"https://github.com/leeoniya/uPlot"}, "a comment"
    assert "@import" not in page and "url(" not in page
    (nonce,) = set(re.findall(r"'nonce-([^']+)'", policy))
    assert re.findall(r"<script[^>]*>", page) == [f'<script nonce="{nonce}">']
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"\sstyle=|\son[a-z]+=\"", page), "the content policy would reject both"
    assert "<h1>a&lt;script&gt;alert(1)&lt;</h1>" in page


@pytest.mark.parametrize(("host", "is_told"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_run_publishes_from_its_thread_and_warns_about_public_access(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, is_told: bool
) -> None:
    loop, config = LoopThread("test"), ReportConfig(dashboard_host=host, dashboard_port=free_port())
    with caplog.at_level(logging.WARNING), ExitStack() as cleanup:
        cleanup.callback(loop.stop)
        dashboard = start_dashboard(loop, tmp_path, config, cleanup)
        assert dashboard is not None and dashboard.address.startswith(f"http://{host}:")

        async def look() -> None:
            async with Session(dashboard.address) as session, session.get("/events") as response:
                assert await next_event(response) == ("history", [])
                dashboard.publish(1, LINE)
                assert (await next_event(response))[1]["step"] == 1

        asyncio.run(asyncio.wait_for(look(), 60))
    dashboard.publish(2, LINE)
    assert ("can read the run's metrics, prompts and completions" in caplog.text) is is_told


def test_a_dashboard_that_cannot_start_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop, elsewhere = LoopThread("test"), ReportConfig(dashboard_host="203.0.113.1")
    with caplog.at_level(logging.WARNING), ExitStack() as cleanup:
        cleanup.callback(loop.stop)
        assert start_dashboard(loop, tmp_path, elsewhere, cleanup) is None
    assert "goes on without a live dashboard" in caplog.text
