"""Malformed messages by the thousand against the real server, while a good learner works on it."""

import asyncio

from tests.fakes import ScriptedEngine, Serving
from tests.inference_server.intrusion import TIMEOUT_S, assert_shut_out, intrude, work_until
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.scripted_server import join_and_push, run_with_server
from tests.malformed import OF_A_DOCTOR, TO_SERVER, without_end
from tests.memory import MemoryWatch

NUM_MESSAGES = 3_000
MAX_GROWTH_MIB = 16.0
"""While the second half of them comes."""


def test_malformed_messages_are_refused_and_counted_and_the_learner_undisturbed() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        def num_turned_away() -> int:
            """Some are the whole Hello of another run."""
            return running.server.status()["messages_refused"] + running.server.status()["busy_answers"]

        await join_and_push(engine, learner)
        before = num_turned_away()
        memory = MemoryWatch(num_turned_away)
        attack = asyncio.create_task(intrude("malformed", running.endpoint, str(NUM_MESSAGES), limit_s=TIMEOUT_S))
        num_groups = await work_until(attack.done, learner, pause_s=0.02)
        growth, sent = memory.stop(), attack.result()["sent"]
        async with asyncio.timeout(TIMEOUT_S):
            while num_turned_away() - before < sent:
                await asyncio.sleep(0.02)
        status = running.server.status()
        assert sent >= NUM_MESSAGES and num_turned_away() - before == sent and status["busy_answers"] < sent / 2
        assert (status["run"], status["policy_version"], status["groups_running"]) == (learner.run, 0, 0)
        assert num_groups > 3
        assert growth < MAX_GROWTH_MIB

    run_with_server(test)


def test_a_frame_that_claims_a_gibibyte_costs_its_sender_the_connection() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        await assert_shut_out(running, learner, ("oversized",))

    run_with_server(test)


def test_a_learner_that_was_welcomed_and_goes_mad_does_not_end_the_server() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
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

    run_with_server(test)
