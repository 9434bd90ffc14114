"""Read the report and the dashboard: parsed HTML, HTTP responses, and the event stream."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp

from learner.report.dashboard import Dashboard
from learner.report.page import write_report

NUM_STEPS = 321
"""Number of steps of the runs with a dashboard."""


class Page(HTMLParser):
    """A parsed page: its tags, ids, loaded resources, scripts and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "action") or name.startswith("on"):
                self.loads.append(value or "")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and data.strip():
            self.scripts.append(data)
        self.text += data

    @property
    def charts(self) -> dict[str, Any]:
        """Charts that the script draws, by title."""
        return {chart["title"]: chart for chart in json.loads(self.scripts[0])}


def page_of(run_dir: Path) -> Page:
    return Page(write_report(run_dir).read_text())


def observed(run_dir: Path, look: Callable[[Dashboard, aiohttp.ClientSession], Awaitable[Any]]) -> Any:
    """Start a dashboard on a free port, run `look` on it, close it, and return the result."""

    async def scene() -> Any:
        dashboard = await Dashboard.start(run_dir, 0, num_steps=NUM_STEPS)
        try:
            async with aiohttp.ClientSession(dashboard.address, timeout=aiohttp.ClientTimeout(total=60)) as session:
                return await look(dashboard, session)
        finally:
            await asyncio.wait_for(dashboard.close(), 60)

    return asyncio.run(scene())


async def text_at(session: aiohttp.ClientSession, path: str) -> str:
    async with session.get(path) as response:
        assert response.status == 200, response.status
        return await response.text()


async def next_event(response: aiohttp.ClientResponse) -> tuple[str, Any]:
    """Return the name and the data of the next event of a stream; ("", None) at its end."""
    name = ""
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            return name, json.loads(line.removeprefix("data: "))
    return "", None
