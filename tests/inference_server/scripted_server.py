"""Tests at the real server with a scripted engine: what they do there, on real sockets, with a learner that they direct."""

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
    """A server that runs, the engine behind it, and a learner that has said nothing yet."""

    engine: ScriptedEngine
    running: Serving
    learner: ScriptedLearner
    others: list[ScriptedLearner] = []

    def status(self) -> dict[str, Any]:
        return self.running.server.status()

    def another(self, run: str = "run-a", keys: LearnerKeys | None = None) -> ScriptedLearner:
        """Return another process of a run, to be closed at the end."""
        self.others.append(ScriptedLearner(self.running.endpoint, run, keys=keys))
        return self.others[-1]

    async def push(self, version: int = 0, session: str = "e1", learner: ScriptedLearner | None = None) -> None:
        """Give the engine weights, without any transport."""
        self.engine.scripted_reports.append([report()])
        learner = learner or self.learner
        await learner.send(begin(version, session))
        await learner.receive(PushDone)

    async def join_and_push(self, version: int = 0) -> None:
        await self.learner.join()
        await self.push(version)

    async def fail_push(self, version: int, session: str, **changes: Any) -> PushFailed:
        """Begin a push of which the only worker reports a failure."""
        self.engine.scripted_reports.append([report(ok=False, **changes)])
        await self.learner.send(begin(version, session))
        return await self.learner.receive(PushFailed)

    async def hold_group(self, group_id: str) -> None:
        """Have a group in the engine that does not end before its release."""
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
    """Make a test of a coroutine that takes a stage `at` which it plays; all else that it takes are fixtures.

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
    """The first push of a session, from a learner that is not where it says."""
    manifest = Manifest(tensors=(), bucket_bytes=1)
    return PushBegin(session=session, version=version, rendezvous=NOBODY, manifest=manifest)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
