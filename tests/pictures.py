"""Take the pictures of a run for the docs: `python -m tests.pictures NAME ADDRESS DIRECTORY`.

Each picture is taken on a desktop and on a phone screen. ADDRESS: a run's report.html, or the dashboard address that a
running run prints. Needs Chromium.
"""

import asyncio
import base64
import sys
from pathlib import Path
from typing import NamedTuple

from tests.browser import Browser, running_browser


class Screen(NamedTuple):
    name: str
    width: int
    height: int
    scheme: str


SCREENS = (Screen("desktop", 1200, 1000, "light"), Screen("phone", 390, 844, "dark"))
QUALITY = 80
"""WebP quality that keeps text sharp at less than 100 KB."""


async def take(browser: Browser, name: str, address: str, directory: Path) -> None:
    """Save a picture of the first screenful on each screen."""
    async with browser.page() as page:
        for screen in SCREENS:
            await page.look_as(screen.width, screen.height, screen.scheme)
            await page.open(address if "://" in address else Path(address).resolve().as_uri())
            await page.until("document.querySelectorAll('svg, canvas').length > 3")
            await asyncio.sleep(1.0)  # a dashboard keeps drawing as steps arrive
            reply = await page.send("Page.captureScreenshot", format="webp", quality=QUALITY)
            (directory / f"{name}-{screen.name}.webp").write_bytes(base64.b64decode(reply["data"]))


if __name__ == "__main__":
    with running_browser() as browser:
        asyncio.run(take(browser, sys.argv[1], sys.argv[2], Path(sys.argv[3])))
