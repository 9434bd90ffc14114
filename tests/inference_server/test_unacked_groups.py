"""Finished groups on their way to the learner: so many bytes at a time, the rest as it acknowledges them."""

import pytest

from protocol.messages import Ack, Cancel, Group, Pulse
from tests.fakes import ScriptedEngine, Serving
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.scripted_server import join_and_push, run_with_server, until

NUM_GROUPS = 12
GROUP_BYTES = 8 * (1 + 2)
"""Of two completions, with one token and two."""


async def come_until_pulse(learner: ScriptedLearner) -> set[str]:
    """Return what has come when two more pulses have: each is sent after what could be sent."""
    for _ in range(2):
        await learner.receive(Pulse)
    groups, learner.unread = learner.unread, []
    return {group.group_id for group in groups if isinstance(group, Group)}


@pytest.mark.usefixtures("pulse_often")
@pytest.mark.parametrize(("window_bytes", "num_at_once"), [(4 * GROUP_BYTES, 4), (1, 1)])
def test_what_a_lost_connection_left_is_sent_in_a_window_that_acks_move_on_and_a_larger_group_alone(
    monkeypatch: pytest.MonkeyPatch, window_bytes: int, num_at_once: int
) -> None:
    monkeypatch.setattr("inference_server.requests.MAX_UNACKED_BYTES", window_bytes)

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        for number in range(NUM_GROUPS):
            await learner.generate(f"g{number}", [1])
        await until(lambda: running.server.status()["groups_unacked"] == NUM_GROUPS)
        learner.channel.close()
        again = ScriptedLearner(running.endpoint)
        await again.join()
        came: set[str] = set()
        while len(came) < NUM_GROUPS:
            more = await come_until_pulse(again)
            assert len(more) == num_at_once and not came & more
            assert await come_until_pulse(again) == set(), "none was acknowledged"
            came |= more
            await again.send(Cancel(group_ids=[more.pop()]))
            await again.send(Ack(group_ids=sorted(more)))
        assert await come_until_pulse(again) == set()
        assert running.server.status()["groups_unacked"] == 0
        again.close()

    run_with_server(test)
