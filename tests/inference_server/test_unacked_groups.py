"""Finished groups on their way to the learner: so many bytes at a time, the rest as it acknowledges them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from protocol.messages import Ack, Cancel, Group, Pulse, PushDone
from tests.fakes import ScriptedEngine, Serving, report, serving
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.test_engine_supervisor import begin

TIMEOUT_S = 60.0
NUM_GROUPS = 12
GROUP_BYTES = 8 * (1 + 2)
"""Of two completions, with one token and two."""


@pytest.fixture(autouse=True)
def pulse_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.server.PULSE_INTERVAL_S", 0.05)


@contextmanager
def learner_at(running: Serving) -> Iterator[ScriptedLearner]:
    learner = ScriptedLearner(running.endpoint)
    try:
        yield learner
    finally:
        learner.close()


async def come_until_pulse(learner: ScriptedLearner) -> set[str]:
    """Return what has come when two more pulses have: each is sent after what could be sent."""
    for _ in range(2):
        await learner.receive(Pulse)
    groups, learner.unread = learner.unread, []
    return {group.group_id for group in groups if isinstance(group, Group)}


async def leave_unacked(running: Serving, engine: ScriptedEngine) -> None:
    """Let a learner get groups and go without a word of them."""
    with learner_at(running) as learner:
        await learner.join()
        engine.scripted_reports.append([report()])
        await learner.send(begin(1, "e"))
        await learner.receive(PushDone)
        for number in range(NUM_GROUPS):
            await learner.generate(f"g{number}", [1])
        while running.server.status()["groups_unacked"] < NUM_GROUPS:
            await asyncio.sleep(0.01)


def test_what_a_lost_connection_left_is_sent_in_a_window_that_acks_move_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.requests.MAX_UNACKED_BYTES", 4 * GROUP_BYTES)

    async def run() -> None:
        engine = ScriptedEngine()
        async with serving(engine) as running:
            await leave_unacked(running, engine)
            with learner_at(running) as learner:
                await learner.join()
                came: set[str] = set()
                while len(came) < NUM_GROUPS:
                    more = await come_until_pulse(learner)
                    assert len(more) == 4 and not came & more
                    assert await come_until_pulse(learner) == set(), "none was acknowledged"
                    came |= more
                    last = more.pop()
                    await learner.send(Ack(group_ids=sorted(more)))
                    await learner.send(Cancel(group_ids=[last]))
                assert await come_until_pulse(learner) == set()
                assert running.server.status()["groups_unacked"] == 0

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_group_that_is_larger_than_the_window_is_sent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.requests.MAX_UNACKED_BYTES", 1)

    async def run() -> None:
        engine = ScriptedEngine()
        async with serving(engine) as running:
            await leave_unacked(running, engine)
            with learner_at(running) as learner:
                await learner.join()
                for _ in range(NUM_GROUPS):
                    (group_id,) = await come_until_pulse(learner)
                    await learner.send(Ack(group_ids=[group_id]))

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
