"""Headless Chromium, controlled over its debugging protocol: open pages, and read what they show."""

import asyncio
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 60.0
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--remote-debugging-port=0",
         "--hide-scrollbars", "--disable-background-networking")  # fmt: skip


class Page:
    """One tab. Every command must be answered within TIMEOUT_S."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        """Errors of the page: exceptions, failed loads, `console.error`."""
        self.requests: list[str] = []
        """Addresses that the page requested, including its own."""

    async def listen(self) -> None:
        async for raw in self._socket:
            message = json.loads(raw.data)
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            elif message["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(message["params"]["exceptionDetails"]))
            elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(str(message["params"]["entry"]))
            elif message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])

    async def send(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(TIMEOUT_S):
            reply = await answer
        assert "error" not in reply, reply
        return reply["result"]

    async def look_as(self, width: int, height: int, scheme: str) -> None:
        """Emulate a screen of this size whose user prefers `scheme`, "light" or "dark"."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def open(self, address: str) -> None:
        await self.send("Page.navigate", url=address)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        reply = await self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    async def until(self, expression: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not await self.value(expression):
                await asyncio.sleep(0.05)

    async def mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        """`kind`: Moved, Pressed or Released. Pressed and Released use the left button."""
        button = "none" if kind == "Moved" else "left"
        await self.send("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, button=button, clickCount=clicks)


class Browser:
    """A Chromium with one tab."""

    def __init__(self, port: int) -> None:
        self._port = port

    @asynccontextmanager
    async def page(self) -> AsyncIterator[Page]:
        """Yield the tab, empty and reset."""
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{self._port}/json/list") as answer:
                (tab,) = [each for each in await answer.json(content_type=None) if each["type"] == "page"]
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                await page.send("Page.enable")
                await page.open("about:blank")
                await page.mouse("Moved", 0, 0)
                await page.send("Log.clear")
                for part in ("Runtime", "Log", "Network"):
                    await page.send(f"{part}.enable")
                yield page
                listening.cancel()


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Yield a browser that ends with the block. Pages are opened one at a time, in any event loop."""
    assert CHROMIUM is not None, "Chromium is missing: apt-get install chromium"
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={directory}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": directory},
        )  # fmt: skip
        try:
            yield Browser(_port_in(Path(directory, "DevToolsActivePort")))
        finally:
            process.kill()
            process.wait()


def _port_in(file: Path) -> int:
    deadline = time.monotonic() + TIMEOUT_S
    while not (file.is_file() and file.read_text()):
        assert time.monotonic() < deadline, f"Chromium did not start within {TIMEOUT_S} s"
        time.sleep(0.05)
    return int(file.read_text().splitlines()[0])
