"""Draining of a server with a scripted engine on real sockets: notifications, finished work, and the end."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from inference_server.config import ServerConfig
from inference_server.engine.interface import Sampled
from protocol.messages import (
    Ack,
    Farewell,
    Group,
    GroupFailed,
    Pulse,
    PushDone,
    PushFailed,
    Sampling,
    Score,
    Scores,
    Welcome,
)
from tests.fakes import ScriptedEngine, report
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.scripted_server import Stage, begin, until, with_server

BEGINS, WAITS = 1, 2
"""Prompts of groups that get their first token immediately, and of groups that get none until released."""


def let_some_begin(engine: ScriptedEngine) -> None:
    """Hold all groups back; those of the prompt BEGINS after their first token."""
    generate = engine.generate

    async def begin_and_generate(
        ids: np.ndarray, sampling: Sampling, salt: str, experts_from: int | None = None
    ) -> AsyncIterator[Sampled]:
        if ids[0] == BEGINS:
            yield Sampled(entered_version=0, salt="s", completions={})
        async for sampled in generate(ids, sampling, salt, experts_from):
            yield sampled

    engine.generate = begin_and_generate  # type: ignore[method-assign]
    engine.release.clear()


async def begin_group(at: Stage) -> None:
    """Join, push, and start a group."""
    await at.join_and_push()
    let_some_begin(at.engine)
    await at.learner.generate("started", [BEGINS])
    await until(lambda: bool(at.engine.prompts))


async def hear_of_it(learner: ScriptedLearner) -> None:
    """Wait until the learner is notified, and answer."""
    while not (await learner.receive(Pulse)).is_draining:
        pass
    await learner.send(Farewell())


@with_server()
async def test_a_drain_finishes_started_groups_returns_the_rest_and_waits_for_the_ack(
    at: Stage,
) -> None:
    await begin_group(at)
    await at.learner.generate("waits", [WAITS])
    await until(lambda: len(at.engine.prompts) == 2)
    assert not at.status()["draining"]
    draining = asyncio.create_task(at.running.server.drain.run())
    await hear_of_it(at.learner)
    assert at.status()["draining"] and at.status()["unavailable"].startswith("the server is draining")
    handed_back = await at.learner.receive(GroupFailed)
    assert (handed_back.group_id, handed_back.code, handed_back.retryable) == ("waits", "draining", True)

    await at.learner.generate("late", [WAITS])
    assert (await at.learner.receive(GroupFailed)).code == "draining"
    await at.learner.generate("started", [BEGINS])  # is in flight
    await at.learner.send(begin(1))
    failed = await at.learner.receive(PushFailed)
    assert (failed.state, failed.weights_intact, failed.retryable) == ("draining", True, True)
    await at.learner.hello()
    with pytest.raises(TimeoutError):
        await at.learner.receive((Welcome, GroupFailed), timeout_s=0.3)

    at.engine.release.set()
    group = await at.learner.receive(Group)
    assert group.group_id == "started" and len(group.completions) == 2
    await asyncio.sleep(0.2)
    assert not draining.done() and at.engine.cancelled == 1, "the shutdown waits for the Ack"
    await at.learner.send(Ack(group_ids=["started"]))
    await draining
    assert len(at.engine.prompts) == 2 and at.engine.calls.count("pause") == 1


@with_server()
async def test_a_server_ends_after_the_learner_is_notified_and_clients_are_answered(at: Stage) -> None:
    num_open = 0
    at.running.server.drain.num_requests = lambda: num_open
    await at.join_and_push()
    await at.learner.send(Farewell())  # not an answer to a drain
    await at.learner.join()
    draining = asyncio.create_task(at.running.server.drain.run())
    await asyncio.sleep(0.2)
    assert not draining.done(), "the shutdown waits for the learner"
    num_open = 1
    await at.learner.generate("crossed the notice", [WAITS])
    await hear_of_it(at.learner)
    assert (await at.learner.receive(GroupFailed)).group_id == "crossed the notice"
    await asyncio.sleep(0.2)
    assert not draining.done(), "the shutdown waits for a client's answer"
    num_open = 0
    await draining


@with_server()
async def test_a_server_without_a_learner_ends_immediately(at: Stage) -> None:
    await at.running.server.drain.run()


@with_server()
async def test_a_push_and_a_score_in_progress_are_finished(at: Stage) -> None:
    await at.join_and_push()
    at.engine.release.clear()
    at.engine.release_pause.clear()
    await at.learner.send(Score(request_id="s", token_ids=np.array([1, 2], np.int32), deadline_s=60))
    at.engine.scripted_reports.append([report()])
    await at.learner.send(begin(1))
    await until(lambda: at.status()["push_state"] == "pausing")
    draining = asyncio.create_task(at.running.server.drain.run())
    await hear_of_it(at.learner)
    at.engine.release_pause.set()
    assert (await at.learner.receive(PushDone)).version == 1
    await asyncio.sleep(0.1)
    assert not draining.done()
    at.engine.release.set()
    assert (await at.learner.receive(Scores)).error is None
    await draining


@pytest.mark.usefixtures("pulse_often")
@with_server()
async def test_the_drain_waits_only_briefly_for_a_lost_learner(at: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.drain.UNREACHED_S", 0.3)
    await at.join_and_push()
    await at.learner.group("unacked", [WAITS])
    let_some_begin(at.engine)
    await at.learner.generate("started", [BEGINS])
    await until(lambda: len(at.engine.prompts) == 2)
    at.learner.channel.close()
    await at.running.server.drain.run()
    assert at.status()["groups_running"] == at.status()["groups_unacked"] == 1


@with_server()
async def test_the_drain_does_not_wait_for_torn_weights(at: Stage) -> None:
    await begin_group(at)
    assert not (await at.fail_push(1, "e1", state="receiving", weights_intact=False, error="scripted")).weights_intact
    draining = asyncio.create_task(at.running.server.drain.run())
    assert (await at.learner.receive(GroupFailed)).group_id == "started"
    await at.learner.send(begin(2, "e2"))
    assert not (await at.learner.receive(PushFailed)).weights_intact
    await hear_of_it(at.learner)
    await draining


@with_server(config=ServerConfig(drain_timeout_s=0.3))
async def test_a_server_that_is_not_drained_in_time_ends_and_logs_what_is_left(
    at: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "inference_server")
    await begin_group(at)
    await at.running.server.drain.run()
    left = "engine calls: 1, learners without a Farewell: 1"
    assert f"not drained after 0.3 s (server.drain_timeout_s): {left}" in caplog.text
