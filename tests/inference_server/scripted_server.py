"""Tests at the real server with a scripted engine: what they do there, on real sockets, as a learner of theirs says."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from inference_server.config import ServerConfig
from protocol.channel.keys import learner_keys, server_keys
from protocol.messages import Manifest, PushBegin, PushDone, Rendezvous
from tests.fakes import ScriptedEngine, Serving, report, serving
from tests.inference_server.scripted_learner import ScriptedLearner

TIMEOUT_S = 60.0
NOBODY = Rendezvous(transport="gloo", host="127.0.0.1", port=1, world_size=2, timeout_s=5)

Test = Callable[[ScriptedEngine, Serving, ScriptedLearner], Awaitable[None]]


def run_with_server(
    test: Test,
    config: ServerConfig = ServerConfig(),  # noqa: B008  (frozen)
    make_engine: Callable[[], ScriptedEngine] = ScriptedEngine,
    keys: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Run a test with a learner that has said nothing yet."""

    async def run() -> None:
        engine = make_engine()
        async with serving(engine, config, keys=server_keys(str(keys)) if keys else None) as running:
            learner = ScriptedLearner(running.endpoint, keys=learner_keys(str(keys)) if keys else None)
            try:
                await asyncio.wait_for(test(engine, running, learner), timeout_s)
            finally:
                learner.close()

    asyncio.run(run())


def begin(version: int, session: str = "e1") -> PushBegin:
    """The first push of a session, from a learner that is not where it says."""
    manifest = Manifest(tensors=(), bucket_bytes=1)
    return PushBegin(session=session, version=version, rendezvous=NOBODY, manifest=manifest)


async def push(engine: ScriptedEngine, learner: ScriptedLearner, version: int = 0, session: str = "e1") -> None:
    """Give the engine weights, without any transport."""
    engine.scripted_reports.append([report()])
    await learner.send(begin(version, session))
    await learner.receive(PushDone)


async def join_and_push(engine: ScriptedEngine, learner: ScriptedLearner, version: int = 0) -> None:
    await learner.join()
    await push(engine, learner, version)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
