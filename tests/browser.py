"""Chromium without a window, told over its debugging protocol what to open, and asked what it shows."""

import asyncio
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 60.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-port=0",
         "--hide-scrollbars", "--disable-background-networking")  # fmt: skip


class Page:
    """One tab. Every command is answered within TIMEOUT_S."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        """What the page complained of: exceptions, refused loads, `console.error`."""
        self.requests: list[str] = []
        """Addresses that the page asked for, its own among them."""

    async def listen(self) -> None:
        async for raw in self._socket:
            said = json.loads(raw.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(str(said["params"]["entry"]))
            elif said["method"] == "Network.requestWillBeSent":
                self.requests.append(said["params"]["request"]["url"])

    async def tell(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(TIMEOUT_S):
            said = await answer
        assert "error" not in said, said
        return said["result"]

    async def look_as(self, width: int, height: int, scheme: str) -> None:
        """A screen of so many points, whose user wants "light" or "dark" pages."""
        await self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def open(self, address: str) -> None:
        await self.tell("Page.navigate", url=address)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        said = await self.tell("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, expression: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not await self.value(expression):
                await asyncio.sleep(0.05)

    async def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        """`kind`: Moved, Pressed or Released. The left button is the one that is held between the last two."""
        button = "none" if kind == "Moved" else "left"
        await self.tell("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, button=button, clickCount=clicks)


@asynccontextmanager
async def a_page() -> AsyncIterator[Page]:
    """In a browser of its own, which ends with it."""
    assert CHROMIUM is not None, "no Chromium here: apt-get install chromium"
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as directory:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *FLAGS, f"--user-data-dir={directory}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, env=os.environ | {"TMPDIR": directory},
        )  # fmt: skip
        try:
            port = await _port_of(Path(directory, "DevToolsActivePort"))
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    (tab,) = [one for one in await answer.json(content_type=None) if one["type"] == "page"]
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    for part in ("Page", "Runtime", "Log", "Network"):
                        await page.tell(f"{part}.enable")
                    yield page
                    listening.cancel()
        finally:
            process.kill()
            await process.wait()


async def _port_of(file: Path) -> int:
    async with asyncio.timeout(TIMEOUT_S):
        while not (file.is_file() and file.read_text()):
            await asyncio.sleep(0.05)
    return int(file.read_text().splitlines()[0])
