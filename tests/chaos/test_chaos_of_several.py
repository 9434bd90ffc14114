"""Chaos on several servers: the schedule, and stops of training."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.events import Events
from tests.chaos.outages import Harm, Outage, outages
from tests.chaos.schedule import STATES, schedule
from tests.chaos.stops import Stop, stops
from tests.chaos.supervisor import ordered_exits
from tests.chaos.traps import Event, Traps

pytestmark = pytest.mark.system


def test_a_campaign_on_several_servers_hits_each_server_and_the_list() -> None:
    faults = [fault for leg in schedule(0, 130, "fake", 3) for fault in leg.faults]
    assert {fault.server for fault in faults} == {0, 1, 2}
    assert {fault.target for fault in faults} == {"server", "learner", "reward worker", "link", "call", "list", "rival"}
    assert {state.label for state in STATES} < {fault.state.label for fault in faults}
    assert {fault.target for fault in faults if fault.kind == "drain"} == {"server"}
    assert not any(fault.kind == "drain" for leg in schedule(0, 130, "fake") for fault in leg.faults)
    assert all(fault.server is None for leg in schedule(0, 130, "fake") for fault in leg.faults)


def test_a_stop_counts_only_the_time_in_which_a_server_was_up() -> None:
    def out(server: int | None, from_s: float, until_s: float) -> Outage:
        return Outage(server=server, from_s=from_s, until_s=until_s)

    steps_s = [0.0, 1.0, 21.0, 22.0]
    assert [stop.seconds for stop in stops(steps_s, [], 2)] == [20.0, 1.0, 1.0]
    assert stops(steps_s, [], 2)[0] == Stop(20.0, 1.0, 21.0)
    for harmless in ([out(0, 2.0, 20.0)], [out(0, 2.0, 8.0), out(1, 8.0, 20.0)]):
        assert stops(steps_s, harmless, 2)[0].seconds == 20.0, "a server was up at every moment"
    assert stops(steps_s, [out(0, 2.0, 8.0), out(1, 5.0, 20.0)], 2)[0].seconds == 17.0
    assert stops(steps_s, [out(0, 2.0, float("inf")), out(1, 5.0, 20.0)], 2)[0].seconds == 5.0
    assert stops(steps_s, [out(None, 2.0, 8.0), out(None, 3.0, 9.0)], 2)[0].seconds == 13.0


def test_an_outage_ends_when_the_same_server_is_up_again() -> None:
    def event(time_s: float, process: str, name: str, server: int | None) -> Event:
        return Event(time_s=time_s, process=process, pid=1, name=name, server=server)

    events = [
        event(1.0, "server", "up", 0), event(3.0, "server", "up", 1), event(4.0, "server", "engine up", 0),
        event(5.0, "learner", "up", None), event(6.0, "server", "up", 0),
    ]  # fmt: skip
    harms = [
        Harm(server=0, from_s=2.0, until="up"), Harm(server=0, from_s=2.0, until="engine up"),
        Harm(server=None, from_s=2.0, until="up"), Harm(server=1, from_s=2.0, until="let go", let_go_s=2.5),
        Harm(server=1, from_s=4.0, until="up"),
    ]  # fmt: skip
    assert [outage.until_s for outage in outages(harms, events)] == [6.0, 4.0, 5.0, 2.5, float("inf")]


def test_events_of_several_files_are_sorted_and_name_their_server(tmp_path: Path) -> None:
    learner, first, second = (tmp_path / name for name in ("learner", "first", "second"))
    for directory in (learner, first, second):
        directory.mkdir()
    files = {learner / "events": 0, first / "events": 0, second / "events": 1}
    events = Events(files, {7001: 0, 7002: 1})
    of_learner, of_second = Traps(learner, "learner"), Traps(second, "server")
    of_learner.record("started")
    of_second.record("up")
    of_learner.record("server ready", 7002)
    of_learner.record("consumed", 5)
    assert [event.name for event in events.read()] == ["started", "up", "server ready", "consumed"]
    assert [event.server for event in events.read()] == [None, 1, 1, None]
    assert (events.ready, events.num_steps) == ({1}, 5)
    of_learner.record("server syncing", 7002)
    of_learner.record("server ready", 7001)
    of_learner.record("consumed", 4)
    events.read()
    assert (events.ready, events.num_steps, events.last_step) == ({0}, 5, 4)
    of_learner.record("started")
    events.read()
    assert events.ready == set()


@pytest.mark.parametrize(("up_at", "may_be_terminated"), [(9.0, True), (11.0, False)])
def test_only_a_server_that_is_not_up_yet_may_end_by_the_signal_that_drains_it(
    up_at: float, may_be_terminated: bool
) -> None:
    up = Event(time_s=up_at, process="server", pid=1, name="up", server=2)
    run: Any = SimpleNamespace(read_events=lambda: [up])
    started: Any = SimpleNamespace(number=2, process=SimpleNamespace(started_at=10.0))
    assert (-signal.SIGTERM in ordered_exits(run, started)) is may_be_terminated
