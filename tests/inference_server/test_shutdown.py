"""Signals and the parts of a server: the first drains, another ends it immediately, and no part outlives it."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from inference_server.engine.interface import EngineDead
from inference_server.shutdown import until_ended
from protocol.signals import SHUTDOWN_SIGNALS

TIMEOUT_S = 60.0


class Part:
    """Runs until it is cancelled or fails."""

    def __init__(self) -> None:
        self.goes_wrong, self.is_cancelled = asyncio.Event(), False

    async def run(self) -> None:
        try:
            await self.goes_wrong.wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        raise EngineDead("scripted")


def tell(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


class Draining:
    """A drain that the test ends, possibly with an error."""

    def __init__(self) -> None:
        self.has_begun, self.may_end, self.is_given_up = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.error: Exception | None = None

    async def run(self) -> None:
        self.has_begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.is_given_up.set()
            raise
        if self.error is not None:
            raise self.error


def run_parts(test: Callable[[asyncio.Task[None], Draining, list[Part]], Awaitable[None]]) -> None:
    """Run a test with two running parts and the task that waits for their end."""

    async def run() -> None:
        parts, drain = [Part(), Part()], Draining()
        ending = asyncio.create_task(until_ended([part.run() for part in parts], drain.run))
        await asyncio.sleep(0)
        await test(ending, drain, parts)

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


@pytest.mark.parametrize("number", SHUTDOWN_SIGNALS)
@pytest.mark.parametrize("copy", [signal.SIGHUP, signal.SIGTERM])
def test_the_first_signal_drains_and_its_copies_are_ignored(number: signal.Signals, copy: signal.Signals) -> None:
    """Kernel and shell both send SIGHUP. A parent forwards the SIGTERM that systemd sends to the server too."""

    async def test(ending: asyncio.Task[None], drain: Draining, parts: list[Part]) -> None:
        tell(number)
        await drain.has_begun.wait()
        for _ in range(2):
            tell(copy)
            await asyncio.sleep(0.05)
        assert not ending.done() and not parts[0].is_cancelled
        drain.may_end.set()
        await ending
        assert all(part.is_cancelled for part in parts)

    run_parts(test)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_drain(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.signals.FORWARDED_WITHIN_S", 0.0)

    async def test(ending: asyncio.Task[None], drain: Draining, parts: list[Part]) -> None:
        tell(signal.SIGTERM)
        await drain.has_begun.wait()
        tell(number)
        await ending
        await drain.is_given_up.wait()
        assert all(part.is_cancelled for part in parts)

    run_parts(test)


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_part_that_fails_ends_the_others_with_its_error(is_draining: bool) -> None:
    async def test(ending: asyncio.Task[None], drain: Draining, parts: list[Part]) -> None:
        if is_draining:
            tell(signal.SIGTERM)
            await drain.has_begun.wait()
        parts[0].goes_wrong.set()
        with pytest.raises(EngineDead, match="scripted"):
            await ending
        assert parts[1].is_cancelled

    run_parts(test)


def test_an_error_while_draining_is_raised_and_every_part_ends() -> None:
    async def test(ending: asyncio.Task[None], drain: Draining, parts: list[Part]) -> None:
        drain.error = EngineDead("while draining")
        drain.may_end.set()
        tell(signal.SIGTERM)
        with pytest.raises(EngineDead, match="while draining"):
            await ending
        assert all(part.is_cancelled for part in parts)

    run_parts(test)
