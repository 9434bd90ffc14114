"""The live dashboard over real sockets: what a page, a slow page and Prometheus get, and that a run never pays for it."""

import asyncio
import json
import logging
import re
import socket
import tracemalloc
from itertools import pairwise

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from learner.report.dashboard import CLIENT_BACKLOG, Dashboard
from learner.report.history import MAX_POINTS, History, LiveCharts
from learner.servers.loop_thread import LoopThread
from tests.learner.report.synthetic_run import write_lines, write_run

LINE = {"reward/mean": 0.5, "reward/std": 0.1, "staleness/mean": 1.0, "time": 1_790_000_000.25}


def observed(run_dir, look):
    """Starts a dashboard on a free port, lets `look(dashboard, session)` look at it, and closes it."""

    async def scene():
        dashboard = await Dashboard.start(run_dir, 0, num_steps=321)
        try:
            async with aiohttp.ClientSession(dashboard.address, timeout=aiohttp.ClientTimeout(total=60)) as session:
                return await look(dashboard, session)
        finally:
            await asyncio.wait_for(dashboard.close(), 60)

    return asyncio.run(scene())


async def next_event(response):
    """The name and the data of the next event of a stream; ("", None) at its end."""
    name = ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            return name, json.loads(line.removeprefix("data: "))
    return "", None


def test_a_page_gets_the_history_and_then_each_step_as_it_comes(tmp_path):
    lines = write_run(tmp_path / "run", steps=7)

    async def look(dashboard, session):
        async with session.get("/events") as response:
            assert response.content_type == "text/event-stream"
            name, points = await next_event(response)
            assert name == "history"
            assert [point["step"] for point in points] == [1, 2, 3, 4, 5, 6, 7]
            assert abs(points[3]["reward/mean"] - lines[3]["reward/mean"]) < 1e-5
            for step in (8, 9):
                dashboard.publish(step, LINE | {"reward/mean": step / 10})
            assert await next_event(response) == ("", {"step": 8, **without_time(LINE), "reward/mean": 0.8})
            assert (await next_event(response))[1]["step"] == 9
        async with session.get("/events") as response:
            _, points = await next_event(response)
            assert [point["step"] for point in points] == list(range(1, 10))

    observed(tmp_path / "run", look)


EPISODE = {
    "state": "finished", "turns": 2, "calls": 1, "failed_calls": 0, "environment_s": 0.05,
    "branches": [{"prompt": None, "runs": [[3, "37+45="], [None, "82>"], [4, "82"]]}],
}  # fmt: skip


def test_a_page_gets_what_was_written_last_with_who_said_what(tmp_path):
    write_run(tmp_path / "run", steps=3)
    path = tmp_path / "run/samples.jsonl"

    async def look(dashboard, session):
        path.unlink()
        async with session.get("/completions") as response:
            assert response.status == 204
        first = {"step": 1, "prompt": "1>", "completions": ["1"], "rewards": [1.0]}
        last = {
            "step": 11,
            "prompt": "37,45>",
            "completions": ["…", "…"],
            "rewards": [1.0, None],
            "episodes": [EPISODE] * 2,
            "answer": "<b>82</b>",
        }
        write_lines(path, [first, last])
        with path.open("a") as file:
            file.write('{"step": 21, "prompt": "cut o')
        async with session.get("/completions") as response:
            assert response.content_type == "text/html"
            return await response.text()

    table = observed(tmp_path / "run", look)
    assert table.index(">11</td>") < table.index(">1</td>"), "the newest first"
    assert table.count('<tr class="completion">') == 3
    assert '<span class="v0">37+45=</span><span class="environment">82&gt;</span><span class="v1">82</span>' in table
    assert "finished · 2 turns · 1 tool call · 0.1 s in the environment" in table
    assert '<span class="reward t10">1.00</span>' in table and '<span class="reward none">–</span>' in table
    assert "&lt;b&gt;82&lt;/b&gt;" in table and "<b>" not in table
    assert "style=" not in table, "the page's policy would refuse it"


def test_the_charts_have_the_values_of_the_metrics_and_follow_each_step(tmp_path):
    lines = write_run(tmp_path / "run", steps=7)

    async def look(dashboard, session):
        told = []
        for step in (8, 9):
            async with session.get("/charts") as response:
                assert response.content_type == "application/json"
                told.append({chart["title"]: chart["series"][0] for chart in await response.json()})
            dashboard.publish(step, {**lines[0], "policy/entropy": float(step)})
            await asyncio.sleep(0.05)
        return told

    for count, charts in enumerate(observed(tmp_path / "run", look), start=7):
        recorded = [line["policy/entropy"] for line in lines] + [8.0] * (count - 7)
        assert charts["Entropy"]["x"] == list(range(1, count + 1))
        assert charts["Entropy"]["y"] == pytest.approx(recorded, rel=1e-5)


def test_many_clients_cost_one_making_of_the_charts_per_step(tmp_path, monkeypatch):
    write_run(tmp_path / "run", steps=3)
    made = []
    monkeypatch.setattr("learner.report.history.encoded_charts", lambda points: made.append(points) or b"[]")

    async def look(dashboard, session):
        async def ask():
            async with session.get("/charts") as response:
                assert await response.json() == []

        await asyncio.gather(*(ask() for _ in range(20)))
        dashboard.publish(4, LINE)
        await asyncio.sleep(0.05)
        await asyncio.gather(*(ask() for _ in range(20)))

    observed(tmp_path / "run", look)
    assert len(made) == 2


def test_charts_that_could_not_be_made_are_made_at_the_next_request(monkeypatch):
    history, made = History(), []
    history.add(1, LINE)

    def broken_once(points):
        made.append(points)
        if len(made) == 1:
            raise RuntimeError("broken")
        return b"[]"

    monkeypatch.setattr("learner.report.history.encoded_charts", broken_once)

    async def scene():
        charts = LiveCharts(lambda: history)
        with pytest.raises(RuntimeError, match="broken"):
            await charts.newest()
        return await charts.newest()

    assert asyncio.run(scene()) == b"[]" and len(made) == 2


def test_a_line_that_is_no_sample_costs_the_page_its_panel_alone(tmp_path):
    async def look(dashboard, session):
        (tmp_path / "samples.jsonl").write_text("nonsense\n")
        async with session.get("/completions") as response:
            return response.status

    assert observed(tmp_path, look) == 204


def without_time(line):
    return {name: value for name, value in line.items() if name != "time"}


def test_a_step_published_from_another_thread_arrives(tmp_path):
    thread = LoopThread("test-dashboard")
    try:
        dashboard = thread.call(Dashboard.start(tmp_path, 0), 10)

        async def look():
            async with aiohttp.ClientSession(dashboard.address) as session, session.get("/events") as response:
                assert await next_event(response) == ("history", [])
                dashboard.publish(1, LINE)
                assert (await next_event(response))[1]["step"] == 1

        asyncio.run(asyncio.wait_for(look(), 60))
        thread.call(dashboard.close(), 60)
        dashboard.publish(2, LINE)
    finally:
        thread.stop()


def test_closing_ends_the_streams_at_once(tmp_path):
    async def look(dashboard, session):
        async with session.get("/events") as response:
            await next_event(response)
            await asyncio.wait_for(dashboard.close(), 20)
            assert await next_event(response) == ("", None)

    observed(tmp_path, look)


def test_a_client_that_does_not_read_is_dropped_before_it_costs_memory(tmp_path):
    async def look(dashboard, session):
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
                assert len(dashboard._clients) == 1, "the slow one is gone, the other is still there"
                assert next(iter(dashboard._clients)).queue.qsize() <= CLIENT_BACKLOG
                assert grown < 3e6, "3,000 steps of 2 kB were published; only the thinned history may stay"

    observed(tmp_path, look)


def test_a_port_in_use_is_replaced_with_a_warning_that_names_port_and_knob(tmp_path, caplog):
    async def look(dashboard, session):
        port = int(dashboard.address.rsplit(":", 1)[1])
        with caplog.at_level(logging.WARNING):
            second = await Dashboard.start(tmp_path, port)
        try:
            assert second.address not in ("", dashboard.address)
            assert str(port) in caplog.text and "learner.report.dashboard_port" in caplog.text
            async with session.get(f"{second.address}/health") as response:
                assert response.status == 200
        finally:
            await second.close()

    observed(tmp_path, look)


def test_health_tells_the_newest_step(tmp_path):
    async def look(dashboard, session):
        async with session.get("/health") as response:
            assert await response.json() == {"status": "ok", "step": 0}
        dashboard.publish(12, LINE)
        async with session.get("/health") as response:
            assert await response.json() == {"status": "ok", "step": 12}

    observed(tmp_path, look)


def test_prometheus_gets_the_newest_step_under_legal_names(tmp_path):
    line = {
        "reward/mean": 0.25,
        "reward/it's-<b>right\n": 0.75,
        "reward/a.b": 1.0,
        "reward/a-b": 2.0,
        "loss/policy": float("nan"),
    }

    async def look(dashboard, session):
        async with session.get("/metrics") as response:
            assert "slipstream_step 0.0" in await response.text()
        dashboard.publish(1, {"reward/mean": 0.0, "old/metric": 1.0})
        dashboard.publish(2, line)
        async with session.get("/metrics") as response:
            assert response.content_type == "text/plain"
            return list(text_string_to_metric_families(await response.text()))

    families = observed(tmp_path, look)
    value_of = {sample.name: sample.value for family in families for sample in family.samples}
    assert value_of.pop("slipstream_loss_policy") != 0.0
    assert value_of == {
        "slipstream_step": 2.0,
        "slipstream_reward_mean": 0.25,
        "slipstream_reward_it_s__b_right_": 0.75,
        "slipstream_reward_a_b": 1.0,
        "slipstream_reward_a_b_": 2.0,
    }
    assert {family.type for family in families} == {"gauge"}


def test_the_page_loads_nothing_and_its_policy_allows_only_its_own_script(tmp_path):
    run_dir = tmp_path / "a<script>alert(1)<"
    write_run(run_dir, steps=1)

    async def look(dashboard, session):
        async with session.get("/") as response:
            return await response.text(), response.headers["Content-Security-Policy"]

    page, policy = observed(run_dir, look)
    addresses = re.findall(r"""(?:src|href|action|srcset)\s*=\s*["']?([^"'\s>]*)""", page)
    assert addresses == ["/metrics"]
    assert set(re.findall(r"https?://[^\"'\s]*", page)) == {"https://github.com/leeoniya/uPlot"}, "a comment"
    assert "@import" not in page and "url(" not in page
    nonce = re.search(r"'nonce-([^']+)'", policy).group(1)
    assert re.findall(r"<script[^>]*>", page) == [f'<script nonce="{nonce}">']
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"\sstyle=|\son[a-z]+=\"", page), "the policy would refuse both"
    assert "<h1>a&lt;script&gt;alert(1)&lt;</h1>" in page


def test_every_page_has_another_nonce_and_knows_how_many_steps_are_planned(tmp_path):
    async def look(dashboard, session):
        pages = []
        for _ in range(2):
            async with session.get("/") as response:
                pages.append(await response.text())
        return pages

    first, second = observed(tmp_path, look)
    assert first != second
    assert 'data-steps="321"' in first


def test_a_broken_metrics_file_costs_the_history_and_not_the_run(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')

    async def look(dashboard, session):
        async with session.get("/events") as response:
            assert await next_event(response) == ("history", [])

    observed(tmp_path, look)
    assert "line 2" in caplog.text


def test_history_is_thinned_evenly_and_keeps_the_first_and_the_newest_step():
    history = History()
    for step in range(1, 10_001):
        history.add(step, LINE)
    steps = steps_of(history)
    assert MAX_POINTS // 2 <= len(steps) <= MAX_POINTS
    assert steps[0] == 1 and steps[-1] == 10_000
    assert len({later - earlier for earlier, later in pairwise(steps[:-1])}) == 1


def test_a_resume_takes_back_the_steps_that_it_repeats(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "reward/mean": 0.0} for step in (1, 2, 3, 4, 3)])

    async def look(dashboard, session):
        dashboard.publish(2, {"reward/mean": 1.0})
        async with session.get("/events") as response:
            return (await next_event(response))[1]

    assert observed(tmp_path, look) == [{"step": 1, "reward/mean": 0.0}, {"step": 2, "reward/mean": 1.0}]


def test_what_is_not_finite_is_null_for_the_page():
    history = History()
    assert json.loads(history.add(1, {"a": float("nan"), "b": float("inf"), "c": 1 / 3})) == {
        "a": None, "b": None, "c": 0.333333, "step": 1,
    }  # fmt: skip


def steps_of(history):
    return [point["step"] for point in json.loads(history.event().split(b"data: ")[1])]
