"""One simulated server, second by second: a decoding step takes 1 s plus 1 s per running sequence."""

from collections.abc import Callable

import simpy

from deploy.planning.rates import Rates
from deploy.planning.servers import SimulatedGroup, SimulatedServer
from tests.deploy.planned_run import constant

RATES = Rates(lengths=constant(1), decode_step_s=1.0, decode_token_s=1.0, learner_token_s=1.0)


def ends(capacity: int, *events: tuple[float, Callable[[SimulatedServer], object]]) -> dict[int, float]:
    """Return when each group of a server is done, given timed events."""
    env = simpy.Environment()
    done_at: dict[int, float] = {}
    server = SimulatedServer(env, RATES, capacity, lambda group: done_at.__setitem__(group.slot, env.now))
    for time, act in events:
        env.timeout(time).callbacks.append(lambda _, act=act: act(server))
    env.run()
    return done_at


def asks(slot: int, *lengths: float) -> Callable[[SimulatedServer], None]:
    return lambda server: server.submit([SimulatedGroup(slot, list(lengths), 0.0)])


def test_a_sequence_takes_its_length_times_the_step_of_all_running_sequences() -> None:
    assert ends(4, (3.0, asks(0, 10))) == {0: 23.0}
    assert ends(4, (0.0, asks(0, 10)), (10.0, asks(1, 5))) == {0: 25.0, 1: 25.0}, "new groups slow down running groups"
    assert ends(4, (0.0, asks(0, 2, 6))) == {0: 2 * 3 + 4 * 2}, "a group ends with its longest sequence"
    assert ends(1, (0.0, asks(0, 3, 1)), (0.0, asks(1, 2))) == {0: 8.0, 1: 12.0}, (
        "without a free slot groups wait in order"
    )


def test_a_pause_costs_its_seconds_and_nothing_else() -> None:
    pause = (4.0, lambda server: server.pause()), (9.0, lambda server: server.resume(1))
    assert ends(4, (0.0, asks(0, 10)), *pause) == {0: 25.0}
    assert ends(4, (5.0, asks(0, 1)), *pause) == {0: 11.0}


def test_a_server_that_returns_during_a_weight_sync_stays_paused_until_its_end() -> None:
    events = (
        (1.0, lambda server: server.die()),
        (2.0, lambda server: server.pause()),
        (3.0, lambda server: server.join(1)),
    )
    resume = (9.0, lambda server: server.resume(2))
    assert ends(4, *events, (4.0, asks(0, 10)), resume) == {0: 29.0}
    assert ends(4, events[0], events[2], (4.0, asks(0, 10))) == {0: 24.0}


def test_a_group_is_as_old_as_its_first_token() -> None:
    group, late = SimulatedGroup(0, [4.0, 4.0], 0.0), SimulatedGroup(1, [1.0], 0.0)
    ends(
        1,
        (0.0, lambda server: server.submit([group, late])),
        (3.0, lambda server: server.pause()),
        (4.0, lambda server: server.resume(1)),  # the second sequence starts after this
    )
    assert (group.oldest_version, late.oldest_version) == (0, 1)


def test_groups_of_a_dead_server_are_returned_unchanged() -> None:
    lost: list[SimulatedGroup] = []
    assert ends(4, (0.0, asks(7, 1, 5)), (4.0, lambda server: lost.extend(server.die()))) == {}
    assert [(group.slot, group.num_left, group.oldest_version) for group in lost] == [(7, 2, -1)]
