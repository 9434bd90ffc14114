"""Charts in a real browser: hover, zoom, updates, and what of a series is drawn."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.report.charts import Chart, time_chart
from learner.report.dashboard import Dashboard
from learner.report.series import Kind, Series
from learner.report.summary import read_metrics
from learner.report.templates import json_of
from tests.browser import CHROMIUM, Page, a_page
from tests.learner.report.browser_pages import (
    CARD,
    drawn,
    in_a_report,
    legend_of,
    looked_at,
    place_in,
)
from tests.learner.report.synthetic_run import write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")


def test_hover_reads_all_series_of_all_charts_at_one_step(tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        lines = {line["step"]: line for line in read_metrics(tmp_path / "run")}
        at_rest = await legend_of(page, "Reward per step")
        await page.mouse("Moved", *await place_in(page, "Reward per step", 0.5))
        where, values = await legend_of(page, "Reward per step")
        step = int(where.removeprefix("step "))
        assert 29 <= step <= 32
        for name, metric in (("mean", "reward/mean"), ("exact match", "reward/exact_match")):
            assert float(values[name]) == pytest.approx(lines[step][metric], rel=5e-3)
        where, values = await legend_of(page, "Entropy")
        assert where == f"step {step}" and float(values["entropy"]) == pytest.approx(
            lines[step]["policy/entropy"], rel=5e-3
        )
        assert (await legend_of(page, "Reward over time"))[0] == "seconds", "its x is another"
        await page.mouse("Moved", 2, 2)
        assert await legend_of(page, "Reward per step") == at_rest

    in_a_report(tmp_path, look)


def test_a_drag_zooms_all_charts_of_the_same_x_and_a_double_click_resets(tmp_path: Path) -> None:
    async def steps_at_the_ends(page: Page, title: str) -> list[int]:
        found = []
        for across in (0.0, 1.0):
            await page.mouse("Moved", *await place_in(page, title, across))
            found.append(int((await legend_of(page, title))[0].removeprefix("step ")))
        return found

    async def look(page: Page) -> None:
        assert await steps_at_the_ends(page, "Reward per step") == [1, 60]
        x, y = await place_in(page, "Reward per step", 0.25)
        await page.mouse("Moved", x, y)
        await page.mouse("Pressed", x, y)
        x, y = await place_in(page, "Reward per step", 0.5)
        await page.mouse("Moved", x, y)
        await page.mouse("Released", x, y)
        for title in ("Reward per step", "Staleness per step"):
            first, last = await steps_at_the_ends(page, title)
            assert 15 <= first <= 18 and 29 <= last <= 32, title
        await page.mouse("Moved", x, y)
        for clicks in (1, 2):
            await page.mouse("Pressed", x, y, clicks)
            await page.mouse("Released", x, y, clicks)
        for title in ("Reward per step", "Staleness per step"):
            assert await steps_at_the_ends(page, title) == [1, 60], title

    in_a_report(tmp_path, look)


def test_a_zoomed_dashboard_stays_zoomed_while_steps_come(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", steps=60)

    async def scene() -> None:
        dashboard = await Dashboard.start(tmp_path / "run", 0)
        try:
            async with a_page() as page:
                await looked_at(page, "desktop", "light", dashboard.address)
                await drawn(page)
                x, y = await place_in(page, "Reward per step", 0.25)
                await page.mouse("Moved", x, y)
                await page.mouse("Pressed", x, y)
                x, y = await place_in(page, "Reward per step", 0.5)
                await page.mouse("Moved", x, y)
                await page.mouse("Released", x, y)
                dashboard.publish(61, {**lines[0], "optim/lr": 0.75})
                await page.until(f"!!{CARD.format('Learning rate')}.querySelector('[aria-label*=\"0.376\"]')")
                await page.mouse("Moved", *await place_in(page, "Reward per step", 1.0))
                assert 29 <= int((await legend_of(page, "Reward per step"))[0].removeprefix("step ")) <= 32
        finally:
            await dashboard.close()

    asyncio.run(scene())


def test_a_connection_that_ends_within_an_answer_costs_one_update_of_the_charts(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", steps=20)

    async def scene() -> None:
        dashboard = await Dashboard.start(tmp_path / "run", 0)
        try:
            async with a_page() as page:
                await looked_at(page, "desktop", "light", dashboard.address)
                await drawn(page)
                await page.value(BREAK_ONE_ANSWER)
                dashboard.publish(21, {**lines[0], "optim/lr": 0.5})
                await page.until("window.fetch === whole")
                dashboard.publish(22, {**lines[0], "optim/lr": 0.75})
                await page.until(f"{CARD.format('Learning rate')}.querySelector('.plot').ariaLabel.includes('0.75')")
                assert page.errors == []
        finally:
            await dashboard.close()

    asyncio.run(scene())


BREAK_ONE_ANSWER = """var whole = window.fetch; window.fetch = async () => {
    window.fetch = whole;
    return { status: 200, text: () => Promise.reject(new TypeError('network error')) };
  }; 0"""
DRAW = """(() => {{
    const real = uPlot;
    window.seen = null;
    uPlot = Object.assign(function (...args) {{ return window.plot = new real(...args); }}, real);
    drawCharts(document.getElementById("charts"), [{chart}]);
    uPlot = real;
    requestAnimationFrame(() => requestAnimationFrame(() => {{
      const {{ ctx, bbox, scales }} = window.plot, colors = new Set();
      const pixels = ctx.getImageData(bbox.left, bbox.top, bbox.width, bbox.height).data;
      for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200) colors.add(`${{pixels.slice(i, i + 3)}}`);
      window.seen = [scales.y.max, colors.size];
    }}));
  }})()"""


async def draw(page: Page, chart: Chart) -> tuple[float, int]:
    """Draws a chart, and returns the upper end of its y axis and the number of colors in its plot."""
    await page.value(DRAW.format(chart=json_of(chart)))
    await page.until("window.seen")
    return await page.value("window.seen")


def series_of(kind: Kind, y: list[float], **more: Any) -> Series:
    mean = None if kind in ("bars", "points") else y
    x = [float(place) for place in range(len(y))]
    return Series(name=kind, color="blue", kind=kind, x=x, y=y, mean=mean, **more)


def test_only_long_series_lose_their_outliers(tmp_path: Path) -> None:
    long = [1.0] * 400
    cases = {
        "bars": ([series_of("bars", [990.0, 10.0, 3.0])], 990.0),
        "many bars": ([series_of("bars", [*long, 990.0])], 990.0),
        "points": ([series_of("points", [0.02, 0.10, 0.85])], 0.85),
        "one step": ([series_of("line", [40.0]), series_of("line", [900.0])], 900.0),
        "short": ([series_of("line", [*long[:198], 50.0])], 50.0),
        "outliers": ([series_of("line", [*long, 50.0, 60.0])], None),
        "two percent": ([series_of("line", [*long, *[50.0] * 8])], 50.0),
        "a short one": ([series_of("line", long), series_of("line", [50.0])], 50.0),
    }

    async def look(page: Page) -> None:
        for title, (parts, highest) in cases.items():
            chart = Chart(title=title, caption="", x="step", series=parts)
            top, _ = await draw(page, chart)
            assert top < 2.0 if highest is None else top >= highest, title

    in_a_report(tmp_path, look)


def test_the_time_of_a_single_step_is_visible(tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        lines = read_metrics(tmp_path / "run")
        for count in (1, 2):
            chart = time_chart(lines[:count])
            assert isinstance(chart, Chart)
            _, num_colors = await draw(page, msgspec.structs.replace(chart, title="Drawn twice"))
            assert num_colors >= len(chart.series), "each part has a color"

    in_a_report(tmp_path, look)
