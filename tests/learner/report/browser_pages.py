"""Pages of the report and the dashboard in a real browser: how they are opened, read and pointed at."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from learner.report.page import write_report
from tests.browser import Page, a_page
from tests.learner.report.synthetic_run import write_run

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


async def legend_of(page: Page, title: str) -> tuple[str, dict[str, str]]:
    """Where the cursor of a chart is, and the value of each of its series there."""
    return await page.value(
        f"(() => {{ const legend = {CARD.format(title)}.querySelector('.legend');"
        "return [legend.querySelector('.at').textContent, Object.fromEntries([...legend.querySelectorAll('.key')].map("
        "(key) => [key.firstChild.textContent, key.querySelector('b').textContent]))]; })()"
    )


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
