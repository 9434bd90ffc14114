"""What a signal does to the parts of a server: the first drains it, another ends it, and no part outlives it."""

import asyncio
import os
import signal

import pytest

from inference_server.engine.interface import EngineDead
from inference_server.shutdown import until_ended
from protocol.signals import SHUTDOWN_SIGNALS

TIMEOUT_S = 20.0


class Part:
    """Runs until it is cancelled, or told to go wrong."""

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


@pytest.mark.parametrize("number", SHUTDOWN_SIGNALS)
def test_the_first_signal_drains_and_then_every_part_ends(number: signal.Signals) -> None:
    async def run() -> None:
        part, drains, is_drained = Part(), asyncio.Event(), asyncio.Event()

        async def drain() -> None:
            drains.set()
            await is_drained.wait()

        ending = asyncio.create_task(until_ended([part.run()], drain))
        await asyncio.sleep(0)
        tell(number)
        await drains.wait()
        await asyncio.sleep(0.05)
        assert not ending.done() and not part.is_cancelled
        is_drained.set()
        await ending
        assert part.is_cancelled

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_another_signal_ends_what_drains(number: signal.Signals) -> None:
    async def run() -> None:
        part, drains, is_given_up = Part(), asyncio.Event(), asyncio.Event()

        async def drain() -> None:
            drains.set()
            try:
                await asyncio.Event().wait()
            finally:
                is_given_up.set()

        ending = asyncio.create_task(until_ended([part.run()], drain))
        await asyncio.sleep(0)
        tell(signal.SIGTERM)
        await drains.wait()
        tell(number)
        await ending
        await is_given_up.wait()
        assert part.is_cancelled

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


@pytest.mark.parametrize("first", SHUTDOWN_SIGNALS)
def test_a_terminal_that_closes_says_so_more_than_once_and_ends_nothing_sooner(first: signal.Signals) -> None:
    """Both the kernel and the shell send SIGHUP, and systemd may send one after its SIGTERM."""

    async def run() -> None:
        part, is_drained = Part(), asyncio.Event()
        ending = asyncio.create_task(until_ended([part.run()], is_drained.wait))
        await asyncio.sleep(0)
        for number in (first, signal.SIGHUP, signal.SIGHUP):
            tell(number)
            await asyncio.sleep(0.05)
        assert not ending.done() and not part.is_cancelled
        is_drained.set()
        await ending

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


@pytest.mark.parametrize("is_draining", [False, True])
def test_a_part_that_ends_by_itself_ends_the_others_with_its_error(is_draining: bool) -> None:
    async def run() -> None:
        wrong, other, drains = Part(), Part(), asyncio.Event()

        async def drain() -> None:
            drains.set()
            await asyncio.Event().wait()

        ending = asyncio.create_task(until_ended([wrong.run(), other.run()], drain))
        await asyncio.sleep(0)
        if is_draining:
            tell(signal.SIGTERM)
            await drains.wait()
        wrong.goes_wrong.set()
        with pytest.raises(EngineDead, match="scripted"):
            await ending
        assert other.is_cancelled

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_what_goes_wrong_while_draining_is_raised_and_every_part_ends() -> None:
    async def run() -> None:
        part = Part()

        async def drain() -> None:
            raise EngineDead("while draining")

        ending = asyncio.create_task(until_ended([part.run()], drain))
        await asyncio.sleep(0)
        tell(signal.SIGTERM)
        with pytest.raises(EngineDead, match="while draining"):
            await ending
        assert part.is_cancelled

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
