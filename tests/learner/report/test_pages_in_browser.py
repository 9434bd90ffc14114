"""Dashboard, report and comparison in a real browser, on phones and desktops, light and dark."""

import asyncio
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from learner.report.charts import Chart
from learner.report.dashboard import Dashboard
from learner.report.page import compare, write_comparison, write_report
from learner.report.series import Kind, Series
from learner.report.summary import read_metrics
from learner.report.templates import json_of
from tests.browser import Browser, Page
from tests.learner.report.browser_pages import (
    CARD,
    LOOKS,
    TILES,
    assert_readable,
    drag,
    legend_of,
    looked_at,
    on_a_page,
    place_in,
    step_at,
)
from tests.learner.report.synthetic_run import write_lines, write_run

pytestmark = pytest.mark.system

HOSTILE = "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", steps=60)
    return tmp_path / "run"


@pytest.mark.parametrize(("screen", "scheme"), LOOKS)
def test_every_page_is_readable_and_runs_no_code_of_a_model(
    browser: Browser, run_dir: Path, tmp_path: Path, screen: str, scheme: str
) -> None:
    lines = [{**line, f"reward/{HOSTILE}": 0.5} for line in read_metrics(run_dir)]
    write_lines(run_dir / "metrics.jsonl", lines)
    sample = {"step": 1, "prompt": HOSTILE, "completions": [HOSTILE], "rewards": [1.0], "answer": HOSTILE}
    write_lines(run_dir / "samples.jsonl", [sample])
    write_run(tmp_path / "other", steps=60, seed=1)
    report = write_report(run_dir).as_uri()
    comparison = write_comparison(*compare([run_dir, tmp_path / "other"])).as_uri()

    async def look_at(page: Page, address: str, num_charts: int, num_completions: int = 1) -> dict[str, Any]:
        page.requests.clear()
        await looked_at(page, address, screen, scheme)
        await page.until(f"document.querySelectorAll('canvas').length >= {num_charts}")
        await page.until(f"document.querySelectorAll('tr.completion').length === {num_completions}")
        await assert_readable(page, scheme)
        assert "ran" not in await page.value("document.title")
        assert await page.value("document.querySelectorAll('img').length") == 0
        return await page.value(TILES)

    async def scene() -> None:
        dashboard = await Dashboard.start(run_dir, 0)
        try:
            async with browser.page() as page:
                tiles = await look_at(page, dashboard.address, 17)
                assert tiles["Step"].startswith("60")
                assert tiles["Reward"] == f"{fmean(line['reward/mean'] for line in lines[-10:]):.3f}"
                assert tiles["Staleness"] == f"{fmean(line['staleness/mean'] for line in lines[-10:]):.2f}"
                assert {address.rpartition("/")[0] for address in page.requests} == {dashboard.address}
                tiles = await look_at(page, report, 18)
                ends = [fmean(line["reward/mean"] for line in part) for part in (lines[:6], lines[-6:])]
                assert tiles["Reward"] == f"{ends[0]:.2f} → {ends[1]:.2f}"
                assert page.requests == [report], "the page must load nothing else"
                await look_at(page, comparison, 5, num_completions=0)
                assert page.requests == [comparison]
        finally:
            await dashboard.close()

    asyncio.run(scene())


BREAK_ONE_ANSWER = """var whole = window.fetch; window.fetch = async () => {
    window.fetch = whole;
    return { status: 200, text: () => Promise.reject(new TypeError('network error')) };
  }; 0"""


def test_an_open_page_survives_a_broken_response_and_a_restarted_learner(browser: Browser, run_dir: Path) -> None:
    lines = read_metrics(run_dir)

    async def scene() -> None:
        first = await Dashboard.start(run_dir, 0)
        port = int(first.address.rpartition(":")[2])
        async with browser.page() as page:
            await looked_at(page, first.address)
            await page.value(BREAK_ONE_ANSWER)
            first.publish(61, {**lines[0], "optim/lr": 0.5})
            await page.until("window.fetch === whole")
            first.publish(62, {**lines[0], "optim/lr": 0.75})
            await page.until(f"{CARD.format('Learning rate')}.querySelector('.plot').ariaLabel.includes('0.625')")
            assert page.errors == []
            await first.close()
            await page.until("document.getElementById('state').textContent === 'no connection to the learner'")
            # The learner resumes from a checkpoint: steps 31 to 62 are repeated with other values.
            again = [{**line, "reward/mean": 0.5} for line in lines[30:35]]
            write_lines(run_dir / "metrics.jsonl", [*lines[:30], *again])
            second = await Dashboard.start(run_dir, port)
            try:
                await page.until("document.querySelector('.tile .value')?.textContent.startsWith('35')")
                assert await page.value("document.getElementById('state').textContent") == "live"
                second.publish(36, {**lines[35], "reward/mean": 0.5})
                await page.until("document.querySelector('.tile .value')?.textContent.startsWith('36')")
                rewards = [line["reward/mean"] for line in lines[26:30]] + [0.5] * 6
                await page.until(f"({TILES})['Reward'] === '{fmean(rewards):.3f}'")
            finally:
                await second.close()

    asyncio.run(scene())


UNTIL_THINNED = """(() => {
    let step = 1600, count;
    do {
      count = points.length;
      step += 1;
      events.onmessage({ data: JSON.stringify({ step, "reward/mean": step / 4 }) });
    } while (points.length > count);
    return step;
  })()"""
"""Sends steps to the page until it drops some of its points, and returns the last."""


def test_tiles_of_a_long_run_show_its_ten_newest_steps(browser: Browser, run_dir: Path) -> None:
    (line,) = read_metrics(run_dir)[-1:]
    write_lines(run_dir / "metrics.jsonl", [{**line, "step": step, "reward/mean": step / 4} for step in range(1, 1601)])

    async def scene() -> None:
        dashboard = await Dashboard.start(run_dir, 0)
        try:
            async with browser.page() as page:
                await page.open(dashboard.address)
                await page.until(f"({TILES})['Reward'] === '{(1591 + 1600) / 8:.3f}'")
                step = await page.value(UNTIL_THINNED)
                assert (await page.value(TILES))["Reward"] == f"{(step - 9 + step) / 8:.3f}"
                assert await page.value("points.length <= MAX_POINTS") and page.errors == []
        finally:
            await dashboard.close()

    asyncio.run(scene())


def test_the_search_keeps_the_rows_with_the_text(browser: Browser, run_dir: Path) -> None:
    async def look(page: Page) -> None:
        rows = "[...document.querySelectorAll('tr.completion')].filter((row) => row.checkVisibility())"
        samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
        shown = [*samples[:25], *samples[-25:]]
        texts = [
            (str(sample["step"]), [sample["prompt"], text, sample["answer"]])
            for sample in shown
            for text in sample["completions"][:4]
        ]
        assert await page.value(f"{rows}.length") == len(texts)
        wanted = shown[30]["answer"]
        fill = (
            "(() => {{ const box = document.querySelector('.search'); box.value = {};box.dispatchEvent(new "
            "Event('input', {{ bubbles: true }})); }})()"
        )
        await page.value(fill.format(json.dumps(wanted)))
        left = await page.value(f"{rows}.map((row) => row.cells[0].textContent)")
        assert left == [step for step, parts in texts if any(wanted in part for part in parts)]
        assert await page.value("document.querySelector('output').textContent") == f"{len(left)} of {len(texts)}"
        await page.value(fill.format("''"))
        assert await page.value(f"{rows}.length") == len(texts)

    on_a_page(browser, write_report(run_dir).as_uri(), look)


def test_hovering_shows_all_series_of_all_charts_at_one_step(browser: Browser, run_dir: Path) -> None:
    lines = {line["step"]: line for line in read_metrics(run_dir)}

    async def look(page: Page) -> None:
        at_rest = await legend_of(page, "Reward per step")
        step = await step_at(page, "Reward per step", 0.5)
        assert 29 <= step <= 32
        _, values = await legend_of(page, "Reward per step")
        for name, metric in (("mean", "reward/mean"), ("exact match", "reward/exact_match")):
            assert float(values[name]) == pytest.approx(lines[step][metric], rel=5e-3)
        where, values = await legend_of(page, "Entropy")
        assert where == f"step {step}"
        assert float(values["entropy"]) == pytest.approx(lines[step]["policy/entropy"], rel=5e-3)
        assert (await legend_of(page, "Reward over time"))[0] == "seconds", "this chart has another x axis"
        await page.mouse("Moved", 2, 2)
        assert await legend_of(page, "Reward per step") == at_rest

    on_a_page(browser, write_report(run_dir).as_uri(), look)


def test_a_drag_zooms_all_charts_with_the_same_x_axis_until_a_double_click(browser: Browser, run_dir: Path) -> None:
    lines = read_metrics(run_dir)

    async def ends(page: Page, title: str) -> tuple[int, int]:
        return await step_at(page, title, 0.0), await step_at(page, title, 1.0)

    async def scene() -> None:
        dashboard = await Dashboard.start(run_dir, 0)
        try:
            async with browser.page() as page:
                await looked_at(page, dashboard.address)
                assert await ends(page, "Reward per step") == (1, 60)
                await drag(page, "Reward per step", 0.25, 0.5)
                dashboard.publish(61, {**lines[0], "optim/lr": 0.75})
                await page.until(f"!!{CARD.format('Learning rate')}.querySelector('[aria-label*=\"0.376\"]')")
                for title in ("Reward per step", "Staleness per step"):
                    first, last = await ends(page, title)
                    assert 15 <= first <= 18 and 29 <= last <= 32, title
                x, y = await place_in(page, "Reward per step", 0.5)
                await page.mouse("Moved", x, y)
                for clicks in (1, 2):
                    await page.mouse("Pressed", x, y, clicks)
                    await page.mouse("Released", x, y, clicks)
                for title in ("Reward per step", "Staleness per step"):
                    assert await ends(page, title) == (1, 61), title
                assert page.errors == []
        finally:
            await dashboard.close()

    asyncio.run(scene())


DRAW = """(() => {{
    const real = uPlot;
    uPlot = Object.assign(function (...args) {{ return window.plot = new real(...args); }}, real);
    drawCharts(document.getElementById("charts"), [{chart}]);
    uPlot = real;
    window.highest = null;
    requestAnimationFrame(() => requestAnimationFrame(() => {{ window.highest = window.plot.scales.y.max; }}));
  }})()"""


async def draw(page: Page, chart: Chart) -> float:
    """Draw a chart and return the upper end of its y axis."""
    await page.value(DRAW.format(chart=json_of(chart)))
    await page.until("window.highest")
    return await page.value("window.highest")


def series_of(kind: Kind, y: list[float], **more: Any) -> Series:
    mean = None if kind in ("bars", "points") else y
    x = [float(i) for i in range(len(y))]
    return Series(name=kind, color="blue", kind=kind, x=x, y=y, mean=mean, **more)


def test_only_long_series_are_clipped_at_outliers(browser: Browser, run_dir: Path) -> None:
    long = [1.0] * 400
    cases = {
        "bars": ([series_of("bars", [990.0, 10.0, 3.0])], 990.0),
        "one step": ([series_of("line", [40.0]), series_of("line", [900.0])], 900.0),
        "short": ([series_of("line", [*long[:198], 50.0])], 50.0),
        "outliers": ([series_of("line", [*long, 50.0, 60.0])], None),
        "a short one": ([series_of("line", long), series_of("line", [50.0])], 50.0),
    }

    async def look(page: Page) -> None:
        for title, (parts, highest) in cases.items():
            chart = Chart(title=title, caption="", x="step", series=parts)
            top = await draw(page, chart)
            assert top < 2.0 if highest is None else top >= highest, title

    on_a_page(browser, write_report(run_dir).as_uri(), look)
