"""Runtime of the server's parts: the first signal drains the server, a second one stops it at once.

    SIGTERM, SIGINT, SIGHUP ─▶ drain ─▶ parts canceled
    second SIGTERM or SIGINT, or a part that ends early ─▶ parts canceled

Invariant: when `until_ended` returns, every part has ended.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from inference_server.engine.interface import EngineDead
from protocol.signals import forces_exit, shutdown_signals

log = logging.getLogger(__name__)


async def until_ended(parts: Sequence[Coroutine[Any, Any, None]], drain: Callable[[], Awaitable[None]]) -> None:
    """Run all parts until the drain after a signal ends, or until a second signal.

    Raises:
        Exception: The error of a part that ends before that, or of the drain.
        EngineDead: A part ended early without an error.
    """
    first, second, first_at = asyncio.Event(), asyncio.Event(), 0.0

    def on_signal(number: int) -> None:
        nonlocal first_at
        if not first.is_set():
            first_at = time.monotonic()
            first.set()
        elif forces_exit(number, first_at):
            second.set()

    for number in shutdown_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    ending = asyncio.create_task(_drain_after_signal(first, second, drain))
    tasks = [asyncio.create_task(part) for part in parts]
    done, _ = await asyncio.wait([ending, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in (ending, *tasks):
        task.cancel()
    ended, *results = await asyncio.gather(ending, *tasks, return_exceptions=True)
    if ending not in done:
        results.append(EngineDead("a part of the server has stopped"))
        raise next(result for result in results if isinstance(result, Exception))
    if isinstance(ended, Exception):
        raise ended
    log.info("stopping")


async def _drain_after_signal(
    first: asyncio.Event, second: asyncio.Event, drain: Callable[[], Awaitable[None]]
) -> None:
    """Wait for a signal, then for the drain or a second signal."""
    await first.wait()
    draining = asyncio.ensure_future(drain())
    again = asyncio.create_task(second.wait())
    try:
        await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
        if draining.done():
            draining.result()
        else:
            log.info("received a second signal, stopping at once")
    finally:
        draining.cancel()
        again.cancel()
