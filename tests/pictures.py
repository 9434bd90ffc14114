"""The pictures of a real run that the pages show: `python -m tests.pictures REPORT DASHBOARD DIRECTORY`.

REPORT: a run's report.html; DASHBOARD: the address that a run prints, while it goes on. Needs Chromium.
"""

import asyncio
import base64
import sys
from pathlib import Path
from typing import NamedTuple

from tests.browser import Page, a_page


class Screen(NamedTuple):
    name: str
    width: int
    height: int
    scheme: str


SCREENS = (Screen("desktop", 1200, 1100, "light"), Screen("phone", 390, 844, "dark"))
QUALITY = 80
"""Of WebP: sharp text at less than 100 KB."""


async def take(report: Path, dashboard: str, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    async with a_page() as page:
        for name, address in (("dashboard", dashboard), ("report", report.resolve().as_uri())):
            for screen in SCREENS:
                await page.look_as(screen.width, screen.height, screen.scheme)
                await page.open(address)
                await page.until("document.querySelectorAll('svg, canvas').length > 0")
                await picture(page, directory / f"{name}-{screen.name}.webp")


async def picture(page: Page, path: Path) -> None:
    """What the screen shows, without what one would have to scroll to."""
    said = await page.tell("Page.captureScreenshot", format="webp", quality=QUALITY)
    path.write_bytes(base64.b64decode(said["data"]))


if __name__ == "__main__":
    asyncio.run(take(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
