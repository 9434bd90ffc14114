"""A server that is told to end, over real sockets in front of a scripted engine: whom it tells, what it finishes, when it is over."""

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
from tests.fakes import ScriptedEngine, Serving, report
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.scripted_server import begin, join_and_push, run_with_server, until

BEGINS, WAITS = 1, 2
"""Prompts of groups that get their first token at once, and of groups that get none until they may end."""


def let_some_begin(engine: ScriptedEngine) -> None:
    """Hold all groups back, those of the prompt BEGINS after their first token."""
    generate = engine.generate

    async def begin_and_generate(ids: np.ndarray, sampling: Sampling, salt: str) -> AsyncIterator[Sampled]:
        if ids[0] == BEGINS:
            yield Sampled(entered_version=0, salt="s", completions={})
        async for sampled in generate(ids, sampling, salt):
            yield sampled

    engine.generate = begin_and_generate  # type: ignore[method-assign]
    engine.release.clear()


async def begin_group(engine: ScriptedEngine, learner: ScriptedLearner) -> None:
    """Be welcomed, push, and have a group that has begun."""
    await join_and_push(engine, learner)
    let_some_begin(engine)
    await learner.generate("begun", [BEGINS])
    await until(lambda: bool(engine.prompts))


async def hear_of_it(learner: ScriptedLearner) -> None:
    """Return when the learner has been told, and has answered."""
    while not (await learner.receive(Pulse)).is_draining:
        pass
    await learner.send(Farewell())


def test_what_has_started_is_finished_what_has_not_is_handed_back_and_the_end_waits_for_the_ack() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await begin_group(engine, learner)
        await learner.generate("waits", [WAITS])
        await until(lambda: len(engine.prompts) == 2)
        draining = asyncio.create_task(running.server.drain.run())
        await hear_of_it(learner)
        handed_back = await learner.receive(GroupFailed)
        assert (handed_back.group_id, handed_back.code, handed_back.retryable) == ("waits", "draining", True)
        engine.release.set()
        group = await learner.receive(Group)
        assert group.group_id == "begun" and len(group.completions) == 2
        await asyncio.sleep(0.2)
        assert not draining.done() and engine.cancelled == 1, "the end waits for the Ack"
        await learner.send(Ack(group_ids=["begun"]))
        await draining

    run_with_server(test)


def test_a_server_that_drains_says_so_and_takes_nothing_more_on() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await begin_group(engine, learner)
        assert not running.server.status()["draining"]
        draining = asyncio.create_task(running.server.drain.run())
        await hear_of_it(learner)
        status = running.server.status()
        assert status["draining"] and status["unavailable"].startswith("the server is draining")
        await learner.generate("late", [WAITS])
        assert (await learner.receive(GroupFailed)).code == "draining"
        await learner.generate("begun", [BEGINS])  # is on its way
        await learner.send(begin(1))
        failed = await learner.receive(PushFailed)
        assert (failed.state, failed.weights_intact, failed.retryable) == ("draining", True, True)
        await learner.hello()
        with pytest.raises(TimeoutError):
            await learner.receive((Welcome, GroupFailed), timeout_s=0.3)
        engine.release.set()
        await learner.send(Ack(group_ids=[(await learner.receive(Group)).group_id]))
        await draining
        assert len(engine.prompts) == 1 and "load_push" in engine.calls and engine.calls.count("pause") == 1

    run_with_server(test)


def test_a_server_ends_once_the_learner_has_heard_of_it_and_other_clients_are_answered() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        num_open = 0
        running.server.drain.num_requests = lambda: num_open
        await join_and_push(engine, learner)
        await learner.send(Farewell())  # of no drain
        await learner.join()
        draining = asyncio.create_task(running.server.drain.run())
        await asyncio.sleep(0.2)
        assert not draining.done(), "the learner has not answered"
        num_open = 1
        await learner.generate("crossed the word", [WAITS])
        await hear_of_it(learner)
        assert (await learner.receive(GroupFailed)).group_id == "crossed the word"
        await asyncio.sleep(0.2)
        assert not draining.done(), "a client has not been answered"
        num_open = 0
        await draining

    run_with_server(test)


def test_a_server_without_a_learner_ends_at_once() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await asyncio.wait_for(running.server.drain.run(), 5.0)

    run_with_server(test)


def test_a_push_and_a_score_that_are_under_way_are_finished() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        engine.release.clear()
        engine.release_pause.clear()
        await learner.send(Score(request_id="s", token_ids=np.array([1, 2], np.int32), deadline_s=60))
        engine.scripted_reports.append([report()])
        await learner.send(begin(1))
        await until(lambda: running.server.status()["push_state"] == "pausing")
        draining = asyncio.create_task(running.server.drain.run())
        await hear_of_it(learner)
        engine.release_pause.set()
        assert (await learner.receive(PushDone)).version == 1
        await asyncio.sleep(0.1)
        assert not draining.done()
        engine.release.set()
        assert (await learner.receive(Scores)).error is None
        await draining

    run_with_server(test)


@pytest.mark.usefixtures("pulse_often")
def test_a_learner_that_has_gone_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.drain.UNREACHED_S", 0.3)

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        await learner.generate("unacked", [WAITS])
        await learner.receive(Group)
        let_some_begin(engine)
        await learner.generate("begun", [BEGINS])
        await until(lambda: len(engine.prompts) == 2)
        learner.channel.close()
        await asyncio.wait_for(running.server.drain.run(), 20.0)
        assert running.server.status()["groups_running"] == running.server.status()["groups_unacked"] == 1

    run_with_server(test)


def test_torn_weights_are_waited_for_by_nobody() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await begin_group(engine, learner)
        engine.scripted_reports.append([report(ok=False, state="receiving", weights_intact=False, error="scripted")])
        await learner.send(begin(1))
        assert not (await learner.receive(PushFailed)).weights_intact
        draining = asyncio.create_task(running.server.drain.run())
        assert (await learner.receive(GroupFailed)).group_id == "begun"
        await learner.send(begin(2, "e2"))
        assert not (await learner.receive(PushFailed)).weights_intact
        await hear_of_it(learner)
        await draining

    run_with_server(test)


def test_a_server_that_is_not_drained_in_time_ends_all_the_same_and_says_with_what(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "inference_server")

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await begin_group(engine, learner)
        await asyncio.wait_for(running.server.drain.run(), 20.0)

    run_with_server(test, ServerConfig(drain_timeout_s=0.3))
    left = "engine calls: 1, learners without a Farewell: 1"
    assert f"not drained after 0.3 s (server.drain_timeout_s): {left}" in caplog.text
