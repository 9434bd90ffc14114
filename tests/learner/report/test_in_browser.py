"""Dashboard, report and comparison in a real browser: numbers are those of metrics.jsonl, on phones and desktops, light and dark."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

from learner.report.charts import Chart, time_chart
from learner.report.comparison import compare, write_comparison
from learner.report.dashboard import Dashboard
from learner.report.page import write_report
from learner.report.series import Kind, Series
from learner.report.summary import read_metrics
from learner.report.templates import json_of
from tests.browser import CHROMIUM, Page, a_page
from tests.learner.report.synthetic_run import write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

SCREENS = {"phone": (360, 780), "desktop": (1360, 900)}
LOOKS = [(screen, scheme) for screen in SCREENS for scheme in ("light", "dark")]
TILES = """Object.fromEntries([...document.querySelectorAll('.tile')].map((tile) =>
    [tile.querySelector('.label').textContent, tile.querySelector('.value').textContent]))"""
SUNKEN = """[...document.querySelectorAll('h1, h2, h3, p, .value, .label, .note, .key, .at, canvas, input, th, td')].filter((part) => {
    const box = part.getBoundingClientRect();
    return box.width && part.closest('.card, header, main') && !part.closest('.wide, pre, details') && (box.right > innerWidth + 1 || box.left < -1);
  }).map((part) => part.textContent.slice(0, 40))"""
CARD = "[...document.querySelectorAll('.chart')].find((card) => card.querySelector('h3').textContent === '{}')"


async def looked_at(page: Page, screen: str, scheme: str, address: str) -> None:
    width, height = SCREENS[screen]
    await page.look_as(width, height, scheme)
    await page.open(address)


async def assert_readable(page: Page, scheme: str) -> None:
    """Nothing beyond the screen's edge, nothing missing, in the colours that were asked for."""
    assert await page.value("document.documentElement.scrollWidth <= innerWidth"), (
        "it would have to be scrolled sideways"
    )
    assert await page.value(SUNKEN) == []
    red, green, blue = (
        int(part)
        for part in re.findall(r"\d+", await page.value("getComputedStyle(document.body).backgroundColor"))[:3]
    )
    assert (red + green + blue > 384) == (scheme == "light")
    labels = await page.value("[...document.querySelectorAll('.plot')].map((plot) => plot.getAttribute('aria-label'))")
    assert labels and all(re.search(r": .*\d", label) for label in labels), "each has its numbers as text"
    assert page.errors == []


async def drawn(page: Page) -> None:
    await page.until("document.querySelectorAll('.chart canvas').length > 4")
    await page.value("document.querySelector('.chart').scrollIntoView({block: 'center'})")


async def place_in(page: Page, title: str, across: float) -> tuple[float, float]:
    """A point of the screen within a chart: 0 is its left end, 1 its right."""
    left, top, width, height = await page.value(
        f"(() => {{ const box = {CARD.format(title)}.querySelector('.u-over').getBoundingClientRect();"
        "return [box.left, box.top, box.width, box.height]; })()"
    )
    return left + across * (width - 1), top + height / 2


async def told_by(page: Page, title: str) -> tuple[str, dict[str, str]]:
    """Where the cursor of a chart is, and the value of each of its series there."""
    return await page.value(
        f"(() => {{ const legend = {CARD.format(title)}.querySelector('.legend');"
        "return [legend.querySelector('.at').textContent, Object.fromEntries([...legend.querySelectorAll('.key')].map("
        "(key) => [key.firstChild.textContent, key.querySelector('b').textContent]))]; })()"
    )


@pytest.mark.parametrize(("screen", "scheme"), LOOKS)
def test_the_dashboard_shows_the_numbers_of_the_run(tmp_path: Path, screen: str, scheme: str) -> None:
    write_run(tmp_path / "run", steps=60)
    lines = read_metrics(tmp_path / "run")

    async def scene() -> None:
        dashboard = await Dashboard.start(tmp_path / "run", 0)
        try:
            async with a_page() as page:
                await looked_at(page, screen, scheme, dashboard.address)
                await page.until("document.querySelectorAll('.tile').length > 0")
                tiles = await page.value(TILES)
                assert tiles["Step"].startswith("60")
                assert tiles["Reward"] == f"{fmean(line['reward/mean'] for line in lines[-10:]):.3f}"
                assert tiles["Staleness"] == f"{fmean(line['staleness/mean'] for line in lines[-10:]):.2f}"
                await drawn(page)
                assert {address.rpartition("/")[0] for address in page.requests} == {dashboard.address}
                await assert_readable(page, scheme)
        finally:
            await dashboard.close()

    asyncio.run(scene())


def test_each_of_several_evaluated_sets_has_a_curve(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", steps=20)
    rewards = {"evaluation/easy/reward": 0.75, "evaluation/hard/reward": 0.25, "evaluation/function/right/reward": 1.0}
    began = [
        dict.fromkeys(("evaluation/easy/step", "evaluation/hard/step"), 10 * (line["step"] > 10)) for line in lines
    ]
    told = [
        line | rewards | {"evaluation/pass_at_4/reward": 1.0} | steps for line, steps in zip(lines, began, strict=True)
    ]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))

    async def scene() -> None:
        dashboard = await Dashboard.start(tmp_path / "run", 0)
        try:
            async with a_page() as page:
                await looked_at(page, "desktop", "dark", dashboard.address)
                await page.until(f"!!{CARD.format('Evaluations')}?.querySelector('canvas')")
                await page.value(f"{CARD.format('Evaluations')}.scrollIntoView({{block: 'center'}})")
                assert await told_by(page, "Evaluations") == ["step", {"easy": "0.75", "hard": "0.25"}]
                for across, step in ((0.0, 0), (1.0, 10)):  # two sets, evaluated twice
                    await page.mouse("Moved", *await place_in(page, "Evaluations", across))
                    assert (await told_by(page, "Evaluations"))[0] == f"step {step}"
        finally:
            await dashboard.close()

    asyncio.run(scene())


def test_the_open_page_survives_a_learner_that_is_started_again(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", steps=40)

    async def scene() -> None:
        first = await Dashboard.start(tmp_path / "run", 0)
        port = int(first.address.rpartition(":")[2])
        async with a_page() as page:
            await looked_at(page, "desktop", "light", first.address)
            await page.until("document.querySelector('.tile .value')?.textContent.startsWith('40')")
            await first.close()
            await page.until("document.getElementById('state').textContent === 'no connection to the learner'")
            # It comes back behind a checkpoint: steps 31 to 40 come again, and others than before.
            kept = [*lines[:30], *({**line, "reward/mean": 0.5} for line in lines[30:35])]
            (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
            second = await Dashboard.start(tmp_path / "run", port)
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


@pytest.mark.parametrize(("screen", "scheme"), LOOKS)
def test_the_report_and_the_comparison_can_be_read(tmp_path: Path, screen: str, scheme: str) -> None:
    for seed, name in enumerate(("one", "other")):
        write_run(tmp_path / name, steps=60, seed=seed)
    report = write_report(tmp_path / "one")
    comparison = write_comparison(*compare([tmp_path / "one", tmp_path / "other"]))
    lines = read_metrics(tmp_path / "one")

    async def scene() -> None:
        async with a_page() as page:
            await looked_at(page, screen, scheme, report.as_uri())
            await drawn(page)
            tiles: dict[str, Any] = await page.value(TILES)
            ends = [fmean(line["reward/mean"] for line in part) for part in (lines[:6], lines[-6:])]
            assert tiles["Reward"] == f"{ends[0]:.2f} → {ends[1]:.2f}"
            await assert_readable(page, scheme)
            await looked_at(page, screen, scheme, comparison.as_uri())
            assert await page.value("document.querySelectorAll('canvas').length") == 5
            await assert_readable(page, scheme)
            assert page.requests == [report.as_uri(), comparison.as_uri()], "one file each, nothing from elsewhere"

    asyncio.run(scene())


def in_a_report(tmp_path: Path, look: Callable[[Page], Awaitable[None]]) -> None:
    write_run(tmp_path / "run", steps=60)
    report = write_report(tmp_path / "run")

    async def scene() -> None:
        async with a_page() as page:
            await looked_at(page, "desktop", "light", report.as_uri())
            await drawn(page)
            await look(page)
            assert page.errors == []

    asyncio.run(scene())


def test_hover_reads_all_series_of_all_charts_at_one_step(tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        lines = {line["step"]: line for line in read_metrics(tmp_path / "run")}
        at_rest = await told_by(page, "Reward per step")
        await page.mouse("Moved", *await place_in(page, "Reward per step", 0.5))
        where, values = await told_by(page, "Reward per step")
        step = int(where.removeprefix("step "))
        assert 29 <= step <= 32
        for name, metric in (("mean", "reward/mean"), ("exact match", "reward/exact_match")):
            assert float(values[name]) == pytest.approx(lines[step][metric], rel=5e-3)
        where, values = await told_by(page, "Entropy")
        assert where == f"step {step}" and float(values["entropy"]) == pytest.approx(
            lines[step]["policy/entropy"], rel=5e-3
        )
        assert (await told_by(page, "Reward over time"))[0] == "seconds", "its x is another"
        await page.mouse("Moved", 2, 2)
        assert await told_by(page, "Reward per step") == at_rest

    in_a_report(tmp_path, look)


def test_a_drag_zooms_all_charts_of_the_same_x_and_a_double_click_resets(tmp_path: Path) -> None:
    async def steps_at_the_ends(page: Page, title: str) -> list[int]:
        found = []
        for across in (0.0, 1.0):
            await page.mouse("Moved", *await place_in(page, title, across))
            found.append(int((await told_by(page, title))[0].removeprefix("step ")))
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
                assert 29 <= int((await told_by(page, "Reward per step"))[0].removeprefix("step ")) <= 32
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


def test_the_search_keeps_the_rows_that_have_the_text(tmp_path: Path) -> None:
    async def look(page: Page) -> None:
        rows = "[...document.querySelectorAll('tr.completion')].filter((row) => row.checkVisibility())"
        samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
        shown = [*samples[:25], *samples[-25:]]
        whole = await page.value(f"{rows}.length")
        assert whole == sum(min(4, len(sample["completions"])) for sample in shown)
        wanted = shown[30]["answer"]
        fill = "(() => {{ const box = document.querySelector('.search'); box.value = {};box.dispatchEvent(new Event('input', {{ bubbles: true }})); }})()"
        await page.value(fill.format(json.dumps(wanted)))
        left = await page.value(f"{rows}.map((row) => row.cells[0].textContent)")
        texts = [
            (str(sample["step"]), [sample["prompt"], text, sample["answer"]])
            for sample in shown
            for text in sample["completions"][:4]
        ]
        assert left == [step for step, parts in texts if any(wanted in part for part in parts)]
        assert await page.value("document.querySelector('output').textContent") == f"{len(left)} of {whole}"
        await page.value(fill.format("''"))
        assert await page.value(f"{rows}.length") == whole

    in_a_report(tmp_path, look)


def test_what_a_model_wrote_runs_in_no_page(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=3)
    hostile = "</script><script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">"
    sample = {"step": 1, "prompt": hostile, "completions": [hostile], "rewards": [1.0], "answer": hostile}
    (tmp_path / "run/samples.jsonl").write_text(json.dumps(sample) + "\n")
    lines = [{**line, f"reward/{hostile}": 0.5, "reward/other": 0.5} for line in read_metrics(tmp_path / "run")]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = write_report(tmp_path / "run")

    async def scene() -> None:
        dashboard = await Dashboard.start(tmp_path / "run", 0)
        try:
            async with a_page() as page:
                for address in (report.as_uri(), dashboard.address):
                    await page.open(address)
                    await page.until(f"!!{CARD.format('Each reward function')}?.querySelector('canvas')")
                    await page.until("document.querySelectorAll('tr.completion').length === 1")
                    assert "ran" not in await page.value("document.title") and page.errors == []
                    assert await page.value("document.querySelectorAll('img').length") == 0
        finally:
            await dashboard.close()

    asyncio.run(scene())
