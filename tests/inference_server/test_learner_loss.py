"""A learner that is stopped while the server works for it: a process of its own, a scripted engine, real sockets."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest

from inference_server.config import ServerConfig
from protocol.channel import sockets as channel
from protocol.messages import Group, Manifest, Pulse, PushBegin, PushDone, Rendezvous, Welcome
from tests.fakes import ScriptedEngine, report, serving
from tests.inference_server.scripted_learner import ScriptedLearner

TIMEOUT_S = 60.0
DEAD_PEER_TIMEOUT_MS = 600
SILENCE_S = 0.5
PROCESSES = multiprocessing.get_context("spawn")


def learn(endpoint: str, pipe: Connection) -> None:
    """A learner's process: asks for two groups, acknowledges neither, greets again after a silence, tells what comes."""
    channel.HEARTBEAT_INTERVAL_MS, channel.DEAD_PEER_TIMEOUT_MS = 200, DEAD_PEER_TIMEOUT_MS

    async def run() -> None:
        learner = ScriptedLearner(endpoint)
        pipe.send((await learner.join()).server_id)
        rendezvous = Rendezvous(transport="gloo", host="127.0.0.1", port=1, world_size=2, timeout_s=5)
        manifest = Manifest(tensors=(), bucket_bytes=1)
        await learner.send(PushBegin(session="e", version=0, rendezvous=rendezvous, manifest=manifest))
        await learner.receive(PushDone)
        await learner.generate("finished", [1])
        pipe.send((await learner.receive(Group)).group_id)
        pipe.recv()
        await learner.generate("running", [1])
        while True:
            try:
                match await learner.receive((Pulse, Welcome, Group), SILENCE_S):
                    case Welcome(server_id=server_id):
                        pipe.send(server_id)
                    case Group(group_id=group_id):
                        pipe.send(group_id)
            except TimeoutError:
                await learner.hello()

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.channel.sockets.DEAD_PEER_TIMEOUT_MS", DEAD_PEER_TIMEOUT_MS)
    monkeypatch.setattr("inference_server.server.PULSE_INTERVAL_S", 0.05)


@pytest.mark.parametrize("comes_back", [True, False], ids=["in time", "never"])
def test_the_groups_of_a_stopped_learner_are_kept_for_it_until_the_deadline_and_then_aborted(comes_back: bool) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        engine.scripted_reports.append([report()])
        async with serving(engine, ServerConfig(orphan_timeout_s=TIMEOUT_S if comes_back else 0.2)) as running:
            pipe, theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(target=learn, args=(running.endpoint, theirs), daemon=True)
            process.start()
            try:
                server_id = await asyncio.to_thread(pipe.recv)
                assert await asyncio.to_thread(pipe.recv) == "finished"
                engine.release.clear()
                pipe.send("go on")
                await until(lambda: running.server.status()["groups_running"] == 1)
                assert process.pid is not None
                os.kill(process.pid, signal.SIGSTOP)
                if not comes_back:
                    await until(lambda: running.server.status()["run"] is None and engine.cancelled == 1)
                    status = running.server.status()
                    assert (status["groups_running"], status["groups_unacked"]) == (0, 0)
                    assert status["policy_version"] == 0, "evaluation goes on with the last weights"
                    return
                await asyncio.sleep(3 * DEAD_PEER_TIMEOUT_MS / 1000)
                engine.release.set()
                await until(lambda: running.server.status()["groups_unacked"] == 2)
                os.kill(process.pid, signal.SIGCONT)
                assert await asyncio.to_thread(pipe.recv) == server_id
                came = set()
                while came != {"finished", "running"}:
                    came.add(await asyncio.to_thread(pipe.recv))
                assert engine.cancelled == 0
            finally:
                process.kill()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
