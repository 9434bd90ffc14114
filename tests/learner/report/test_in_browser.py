"""Dashboard, report and comparison in a real browser: numbers are those of metrics.jsonl, on phones and desktops, light and dark."""

import asyncio
import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from learner.report.comparison import compare, write_comparison
from learner.report.dashboard import Dashboard
from learner.report.page import write_report
from learner.report.summary import read_metrics
from tests.browser import CHROMIUM, Page, a_page
from tests.learner.report.synthetic_run import write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

SCREENS = {"phone": (390, 844), "desktop": (1360, 900)}
LOOKS = [(screen, scheme) for screen in SCREENS for scheme in ("light", "dark")]
TILES = """Object.fromEntries([...document.querySelectorAll('.tile')].map((tile) =>
    [tile.querySelector('.label').textContent, tile.querySelector('.value').textContent]))"""
SUNKEN = """[...document.querySelectorAll('h1, h2, p, .value, .label, .note, th, td, svg text')].filter((part) => {
    const box = part.getBoundingClientRect();
    return box.width && part.closest('.card, header, main') && !part.closest('.wide, pre, details') && (box.right > innerWidth + 1 || box.left < -1);
  }).map((part) => part.textContent.slice(0, 40))"""


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
    assert await page.value("[...document.querySelectorAll('svg')].every((svg) => svg.getAttribute('aria-label'))")
    assert page.errors == []


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
                assert await page.value("document.querySelectorAll('.chart:not([hidden]) path').length") > 8
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
                card = "[...document.querySelectorAll('.chart')].find((card) => card.textContent.startsWith('Evaluations'))"
                await page.until(f"!{card}.hidden")
                assert await page.value(f"{card}.querySelector('.legend').textContent") == "easy0.75hard0.25"
                assert await page.value(f"{card}.querySelectorAll('circle').length") == 4, "two sets, evaluated twice"
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
            tiles: dict[str, Any] = await page.value(TILES)
            ends = [fmean(line["reward/mean"] for line in part) for part in (lines[:6], lines[-6:])]
            assert tiles["Reward"] == f"{ends[0]:.2f} → {ends[1]:.2f}"
            await assert_readable(page, scheme)
            await looked_at(page, screen, scheme, comparison.as_uri())
            assert await page.value("document.querySelectorAll('svg').length") == 5
            await assert_readable(page, scheme)

    asyncio.run(scene())
