"""Tests of the real server with a scripted engine and a scripted learner, on real sockets."""

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from inference_server.config import ServerConfig
from protocol.channel.keys import LearnerKeys, learner_keys, server_keys
from protocol.messages import Manifest, PushBegin, PushDone, PushFailed, Rendezvous
from tests.fakes import ScriptedEngine, Serving, report, serving
from tests.inference_server.scripted_learner import ScriptedLearner

TIMEOUT_S = 60.0
NOBODY = Rendezvous(transport="tcp", host="127.0.0.1", port=1, world_size=2, timeout_s=5)


class Stage(msgspec.Struct):
    """A running server, its engine, and a learner that has not said Hello yet."""

    engine: ScriptedEngine
    running: Serving
    learner: ScriptedLearner
    others: list[ScriptedLearner] = []

    def status(self) -> dict[str, Any]:
        return self.running.server.status()

    def another(self, run: str = "run-a", keys: LearnerKeys | None = None) -> ScriptedLearner:
        """Return another learner process of a run. It is closed at the end."""
        self.others.append(ScriptedLearner(self.running.endpoint, run, keys=keys))
        return self.others[-1]

    async def push(self, version: int = 0, session: str = "e1", learner: ScriptedLearner | None = None) -> None:
        """Push weights to the engine without any transport."""
        self.engine.scripted_reports.append([report()])
        learner = learner or self.learner
        await learner.send(begin(version, session))
        await learner.receive(PushDone)

    async def join_and_push(self, version: int = 0) -> None:
        await self.learner.join()
        await self.push(version)

    async def fail_push(self, version: int, session: str, **changes: Any) -> PushFailed:
        """Start a push whose only worker reports a failure."""
        self.engine.scripted_reports.append([report(ok=False, **changes)])
        await self.learner.send(begin(version, session))
        return await self.learner.receive(PushFailed)

    async def hold_group(self, group_id: str) -> None:
        """Start a group in the engine that does not end before its release."""
        self.engine.release.clear()
        num_before = len(self.engine.prompts)
        await self.learner.generate(group_id, [1])
        await until(lambda: len(self.engine.prompts) > num_before)


@contextlib.asynccontextmanager
async def staged(
    config: ServerConfig = ServerConfig(),  # noqa: B008  (frozen)
    make_engine: Callable[[], ScriptedEngine] = ScriptedEngine,
    keys: Path | None = None,
) -> AsyncIterator[Stage]:
    engine = make_engine()
    async with serving(engine, config, keys=server_keys(str(keys)) if keys else None) as running:
        at = Stage(engine, running, ScriptedLearner(running.endpoint, keys=learner_keys(str(keys)) if keys else None))
        try:
            yield at
        finally:
            for learner in (at.learner, *at.others):
                learner.close()


def run_with_server(test: Callable[[Stage], Awaitable[None]], **options: Any) -> None:
    """Run a test on a stage."""

    async def run() -> None:
        async with asyncio.timeout(TIMEOUT_S), staged(**options) as at:
            await test(at)

    asyncio.run(run())


def with_server(**options: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Decorate a coroutine as a test with the stage `at`. All other parameters are fixtures.

    With the fixture `keys`, its path, server and learner have keys.
    """

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            run_with_server(lambda at: test(at=at, **fixtures), keys=fixtures.get("keys"), **options)

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name != "at"]
        run.__signature__ = signature.replace(parameters=others, return_annotation=None)  # type: ignore[attr-defined]
        return run

    return decorate


def begin(version: int, session: str = "e1") -> PushBegin:
    """Return the first push of a session, with an address without a learner."""
    manifest = Manifest(tensors=(), bucket_bytes=1)
    return PushBegin(session=session, version=version, rendezvous=NOBODY, manifest=manifest)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
