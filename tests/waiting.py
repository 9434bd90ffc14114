"""Wait for another thread, task or process, with a deadline that passes only if something is broken."""

import asyncio
import time
from collections.abc import Callable

TIMEOUT_S = 60.0


def until(is_so: Callable[[], object], what: str = "", timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


async def until_in_loop(is_so: Callable[[], object]) -> None:
    """Wait until a condition holds in this event loop."""
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():
            await asyncio.sleep(0.01)
