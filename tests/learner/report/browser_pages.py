"""Open, read and operate pages of the report and the dashboard in a real browser."""

import asyncio
import re
from collections.abc import Awaitable, Callable

from tests.browser import Browser, Page

SCREENS = {"phone": (360, 780), "desktop": (1360, 900)}
LOOKS = [(screen, scheme) for screen in SCREENS for scheme in ("light", "dark")]
TILES = """Object.fromEntries([...document.querySelectorAll('.tile')].map((tile) =>
    [tile.querySelector('.label').textContent, tile.querySelector('.value').textContent]))"""
SUNKEN = """[...document.querySelectorAll(
    'h1, h2, h3, p, .value, .label, .note, .key, .at, canvas, input, th, td'
)].filter((part) => {
    const box = part.getBoundingClientRect();
    return box.width && part.closest('.card, header, main') && !part.closest('.wide, pre, details')
        && (box.right > innerWidth + 1 || box.left < -1);
  }).map((part) => part.textContent.slice(0, 40))"""
CARD = "[...document.querySelectorAll('.chart')].find((card) => card.querySelector('h3').textContent === '{}')"


async def looked_at(page: Page, address: str, screen: str = "desktop", scheme: str = "light") -> None:
    """Open a page and wait until its charts are drawn."""
    await page.look_as(*SCREENS[screen], scheme)
    await page.open(address)
    await page.until("document.querySelectorAll('.chart canvas').length > 4")


async def assert_readable(page: Page, scheme: str) -> None:
    """Check that everything is on the screen, complete, and in the colors of the scheme."""
    assert await page.value("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls horizontally"
    assert await page.value(SUNKEN) == []
    color = await page.value("getComputedStyle(document.body).backgroundColor")
    red, green, blue = (int(part) for part in re.findall(r"\d+", color)[:3])
    assert (red + green + blue > 384) == (scheme == "light")
    labels = await page.value("[...document.querySelectorAll('.plot')].map((plot) => plot.getAttribute('aria-label'))")
    assert labels and all(re.search(r": .*\d", label) for label in labels), "each chart must have its numbers as text"
    assert page.errors == []


async def place_in(page: Page, title: str, across: float) -> tuple[float, float]:
    """Scroll to a chart and return a point on the screen in it. `across`: 0 is its left end, 1 its right end."""
    left, top, width, height = await page.value(
        f"(() => {{ const over = {CARD.format(title)}.querySelector('.u-over'); over.scrollIntoView({{block: "
        f"'center'}});const box = over.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; "
        f"}})()"
    )
    return left + across * (width - 1), top + height / 2


async def legend_of(page: Page, title: str) -> tuple[str, dict[str, str]]:
    """Return the cursor position of a chart and the value of each series there."""
    return await page.value(
        f"(() => {{ const legend = {CARD.format(title)}.querySelector('.legend');"
        "return [legend.querySelector('.at').textContent, Object.fromEntries([...legend.querySelectorAll('.key')].map("
        "(key) => [key.firstChild.textContent, key.querySelector('b').textContent]))]; })()"
    )


async def step_at(page: Page, title: str, across: float) -> int:
    """Move the mouse into a chart and return the step at the cursor."""
    await page.mouse("Moved", *await place_in(page, title, across))
    return int((await legend_of(page, title))[0].removeprefix("step "))


async def drag(page: Page, title: str, start: float, end: float) -> None:
    for kind, across in (("Moved", start), ("Pressed", start), ("Moved", end), ("Released", end)):
        await page.mouse(kind, *await place_in(page, title, across))


def on_a_page(browser: Browser, address: str, look: Callable[[Page], Awaitable[None]]) -> None:
    """Run `look` on a page and check that the page reports no errors."""

    async def scene() -> None:
        async with browser.page() as page:
            await looked_at(page, address)
            await look(page)
            assert page.errors == []

    asyncio.run(scene())
