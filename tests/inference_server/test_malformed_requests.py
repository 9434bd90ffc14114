"""Malformed messages by the thousand against the real server, while a good learner works on it."""

import asyncio

import pytest

from tests.fakes import ScriptedEngine, Serving
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.test_intruders import TIMEOUT_S, assert_shut_out, intrude, run_with_server, work_until
from tests.malformed import OF_A_DOCTOR, TO_SERVER, without_end
from tests.memory import MemoryWatch

MAX_GROWTH_MIB = 32.0
"""While the second half of them comes; to keep a kilobyte of each of 100,000 messages would be more."""


@pytest.mark.parametrize(
    "num_messages", [3_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_malformed_messages_are_refused_and_counted_and_the_learner_undisturbed(num_messages: int) -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        def num_turned_away() -> int:
            """Some are the whole Hello of another run."""
            return running.server.status()["messages_refused"] + running.server.status()["busy_answers"]

        before = num_turned_away()
        memory = MemoryWatch(num_turned_away)
        attack = asyncio.create_task(intrude("malformed", running.endpoint, str(num_messages), limit_s=600))
        num_groups = await work_until(attack.done, learner, pause_s=0.02)
        growth, sent = memory.stop(), attack.result()["sent"]
        async with asyncio.timeout(TIMEOUT_S):
            while num_turned_away() - before < sent:
                await asyncio.sleep(0.02)
        status = running.server.status()
        assert sent >= num_messages and num_turned_away() - before == sent and status["busy_answers"] < sent / 2
        assert (status["run"], status["policy_version"], status["groups_running"]) == (learner.run, 0, 0)
        assert num_groups > 10
        print(f"{sent} messages in {memory.seconds:.1f} s, {num_groups} groups, {growth:+.2f} MiB")
        assert growth < MAX_GROWTH_MIB

    run_with_server(test, None, timeout_s=600)


def test_a_frame_that_claims_a_gibibyte_costs_its_sender_the_connection() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await assert_shut_out("oversized", running, learner)

    run_with_server(test, None)


def test_a_learner_that_was_welcomed_and_goes_mad_does_not_end_the_server() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        messages = without_end([*TO_SERVER[1:], *OF_A_DOCTOR], seed=1)
        for _ in range(100):
            mad = ScriptedLearner(running.endpoint, run=learner.run)
            mad.learner = learner.learner  # which need not wait until the one before is missed
            await mad.join()
            for _ in range(5):
                await mad.channel._messages.send(next(messages))
            mad.close()
        assert not running.task.done()
        assert (await learner.join()).server_id

    run_with_server(test, None)
