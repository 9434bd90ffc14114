"""The pictures of a real run that the pages show: `python -m tests.pictures NAME ADDRESS DIRECTORY`, on a desktop and on a phone.

ADDRESS: a run's report.html, or what a run prints as the address of its dashboard, while it goes on. Needs Chromium.
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
"""Of WebP: sharp text at less than 100 KB."""


async def take(browser: Browser, name: str, address: str, directory: Path) -> None:
    """What each screen shows, without what one would have to scroll to."""
    async with browser.page() as page:
        for screen in SCREENS:
            await page.look_as(screen.width, screen.height, screen.scheme)
            await page.open(address if "://" in address else Path(address).resolve().as_uri())
            await page.until("document.querySelectorAll('svg, canvas').length > 3")
            await asyncio.sleep(1.0)  # a dashboard draws as the steps come
            said = await page.tell("Page.captureScreenshot", format="webp", quality=QUALITY)
            (directory / f"{name}-{screen.name}.webp").write_bytes(base64.b64decode(said["data"]))


if __name__ == "__main__":
    with running_browser() as browser:
        asyncio.run(take(browser, sys.argv[1], sys.argv[2], Path(sys.argv[3])))
