"""Distribution of groups over scripted servers on real sockets: lost, late, outdated and draining servers."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from learner.rollouts.dispatcher import Dispatcher
from learner.rollouts.rollouts import Rollouts
from learner.servers.fleet import Fleet
from protocol.config import DEFAULT_ENDPOINT
from protocol.messages import Generate, GroupFailed, Message
from tests.learner.rollouts.hand_server import (
    HandServer,
    answers,
    counts,
    fails,
    hand_servers,
    is_silent,
    next_slots,
    published_on,
    rollouts_of,
    rollouts_on,
)
from tests.learner.runs import make_run
from tests.link import Link
from tests.waiting import TIMEOUT_S, until

ALL_SIX = [f"{slot}.0" for slot in range(6)]


@contextmanager
def rollouts_on_listed(
    tmp_path: Path, *servers: HandServer, **learner: object
) -> Iterator[tuple[Path, Fleet, Rollouts]]:
    """Yield rollouts on the endpoints of a file, which is reread frequently."""
    listed = tmp_path / "servers.txt"
    listed.write_text("\n".join(server.endpoint for server in servers))
    run = make_run(tmp_path, DEFAULT_ENDPOINT, steps=10, max_staleness=1, **learner)
    with rollouts_of(msgspec.structs.replace(run, endpoints_from=f"file:{listed}")) as (fleet, rollouts):
        rollouts.start(0)
        until(lambda: len(fleet.connected()) == len(servers), "all servers are connected")
        yield listed, fleet, rollouts


def greet_again(rollouts: Rollouts) -> None:
    """Greet the first server again, which then sends its late answers."""
    sending = rollouts._fleet.members[0].link._channel.send(rollouts._fleet.hello, TIMEOUT_S)
    rollouts._loop.call(sending, TIMEOUT_S)


def test_groups_are_distributed_evenly(tmp_path: Path) -> None:
    one, other = HandServer(is_silent), HandServer(is_silent)
    with hand_servers(one, other), published_on(tmp_path, one, other):
        until(lambda: len(one.generated) == len(other.generated) == 3, "each server has three of six groups")
    assert sorted(one.generated + other.generated) == ALL_SIX
    assert sorted(one.cancelled) == sorted(other.cancelled) == ALL_SIX


@pytest.mark.parametrize(
    ("answer_of_other", "late_answer", "num_pending"),
    [
        pytest.param(answers, answers, 0, id="a late answer to a finished group is only acknowledged"),
        pytest.param(is_silent, answers, 3, id="the first answer wins"),
        pytest.param(
            is_silent, lambda _, request: fails(request), 6, id="a late failure of a pending group changes nothing"
        ),
    ],
)
def test_late_answers_of_an_abandoned_server(
    tmp_path: Path, answer_of_other: Any, late_answer: Any, num_pending: int
) -> None:
    late, other = HandServer(is_silent), HandServer(answer_of_other)
    late.late_answer = late_answer
    with hand_servers(late, other), closing(Link(int(late.endpoint.rpartition(":")[2]))) as wire:
        late.endpoint = f"tcp://127.0.0.1:{wire.port}"
        with published_on(tmp_path, late, other) as rollouts:
            until(lambda: len(late.generated) == 3, "three groups are pending")
            wire.cut()
            until(lambda: len(other.generated) == 6, "all groups are requested from the other server")
            assert sorted(other.generated) == ALL_SIX, "the ids stay the same"
            wire.restore()
            until(lambda: rollouts._fleet.members[0].state(0) == "ready", "the server is ready again")
            if num_pending < 6:
                until(lambda: set(late.acked) == set(late.generated[:3]), "the late answers are acknowledged")
            if num_pending == 0:
                assert [next_slots(rollouts), next_slots(rollouts)] == [[0, 1, 2], [3, 4, 5]]
            assert rollouts.next_batch(0, 0.5) is None
            assert len(rollouts._dispatcher.group_ids) == rollouts._dispatcher.num_pending.total() == num_pending
            assert counts(tmp_path).admitted == 6


def test_a_server_without_the_version_gets_no_requests_until_it_has_it(tmp_path: Path) -> None:
    one, other = HandServer(), HandServer()
    with hand_servers(one, other), rollouts_on(tmp_path, one, other) as (fleet, rollouts):
        rollouts.publish(0, "server-1")
        assert [next_slots(rollouts), next_slots(rollouts)] == [[0, 1, 2], [3, 4, 5]]
        assert one.generated == [] and [member.state(0) for member in fleet.members] == ["syncing", "ready"]
        one.version = 1

        def wake_and_wait() -> None:
            """Make admission run after the call of `publish` and before the loop handles it."""
            rollouts._wake.set()
            is_there.set()
            assert may_go_on.wait(TIMEOUT_S)

        is_there, may_go_on = threading.Event(), threading.Event()
        rollouts._loop.call_soon(wake_and_wait)
        assert is_there.wait(TIMEOUT_S)
        rollouts.publish(1, "server-0")
        may_go_on.set()
        assert next_slots(rollouts, 1) == [6, 7, 8]
        assert sorted(one.generated) == ["6.0", "7.0", "8.0"] and len(other.generated) == 6
        one.version = other.version = 2
        rollouts.publish(2, "server-0", "server-1")
        assert next_slots(rollouts, 2) == [9, 10, 11]
        assert len(one.generated) in (4, 5) and len(one.generated) + len(other.generated) == 12


def test_a_dropped_server_gets_no_requests_although_it_is_connected(tmp_path: Path) -> None:
    one, other = HandServer(is_silent), HandServer()
    with hand_servers(one, other), published_on(tmp_path, one, other) as rollouts:
        until(lambda: len(one.generated) == 3, "three groups are pending")
        rollouts._fleet.drop(rollouts._fleet.members[0])
        assert [next_slots(rollouts), next_slots(rollouts)] == [[0, 1, 2], [3, 4, 5]]
        assert rollouts._fleet.members[0].state(0) == "syncing" and len(one.generated) == 3


def test_capacity_is_the_sum_over_ready_servers(tmp_path: Path) -> None:
    one, other = HandServer(is_silent, max_concurrent_sequences=8), HandServer(is_silent, max_concurrent_sequences=24)
    with hand_servers(one, other), rollouts_on(tmp_path, one, other) as (_, rollouts):
        rollouts.publish(0, "server-1")
        until(lambda: rollouts._buffer._max_running == 24 / 4, "one server is ready")
        rollouts.publish(0, "server-0")
        until(lambda: rollouts._buffer._max_running == 32 / 4, "both are")
        one.close()
        until(lambda: rollouts._buffer._max_running == 24 / 4, "one server is gone")


# --- draining --------------------------------------------------------------------------------------------------------


@pytest.fixture
def rereads_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.servers.fleet.REREAD_EVERY_S", 0.05)
    monkeypatch.setattr("learner.servers.fleet.CLOSE_AFTER_S", 1.0)  # acknowledgments must go out before


def take_out(listed: Path, leaving: HandServer, *others: HandServer) -> None:
    listed.write_text("\n".join(server.endpoint for server in others))


def say_that_it_ends(listed: Path, leaving: HandServer, *others: HandServer) -> None:
    leaving.is_draining = True


begin_to_drain = pytest.mark.parametrize("begin_to_drain", [take_out, say_that_it_ends])
Leave = Callable[..., None]


@pytest.mark.usefixtures("rereads_often")
@begin_to_drain
def test_a_draining_server_finishes_its_pending_groups_and_gets_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begin_to_drain: Leave
) -> None:
    caplog.set_level("INFO", "learner")
    late, other = HandServer(is_silent), HandServer()
    late.late_answer = answers
    with hand_servers(late, other), rollouts_on_listed(tmp_path, late, other) as (listed, fleet, rollouts):
        changed = list[str]()
        fleet.on_change = changed.append
        rollouts.publish(0, "server-0", "server-1")
        until(lambda: len(late.generated) == 3 and len(other.acked) == 3, "each server has three groups")
        leaving = fleet.members[0]
        begin_to_drain(listed, late, other)
        until(lambda: leaving.state(0) == "draining")
        assert rollouts.next_batch(0, 0.3) is None and leaving.state(0) == "draining" and len(other.generated) == 3
        greet_again(rollouts)
        assert [next_slots(rollouts), next_slots(rollouts)] == [[0, 1, 2], [3, 4, 5]]
        until(lambda: len(late.acked) == 3, "all of its answers are acknowledged")
        if late.is_draining:  # the learner waits until it has ended
            assert leaving.state(0) == "draining"
            late.close()
            until(
                lambda: [member.state(0) for member in fleet.members] == ["ready", "joining"],
                "the learner waits for another server",
            )
            assert fleet.members[1].endpoint == late.endpoint
        else:
            until(lambda: leaving.state(0) == "gone" and len(fleet.members) == 1)
            until(lambda: leaving.link._channel._socket.closed, "the server is free for another run")
    assert len(late.generated) == 3
    changed = [what for what in changed if late.endpoint in what][-2:]
    assert changed == [f"the server at {late.endpoint}: {change}" for change in ("ready → draining", "draining → gone")]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.usefixtures("rereads_often")
@begin_to_drain
def test_a_draining_server_that_does_not_finish_is_abandoned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, begin_to_drain: Leave
) -> None:
    one, other = HandServer(is_silent), HandServer()
    with (
        hand_servers(one, other),
        rollouts_on_listed(tmp_path, one, other, drain_timeout_s=0.2) as (listed, _, rollouts),
    ):
        rollouts.publish(0, "server-0", "server-1")
        until(lambda: len(one.generated) == 3, "three groups are pending")
        begin_to_drain(listed, one, other)
        assert [next_slots(rollouts), next_slots(rollouts)] == [[0, 1, 2], [3, 4, 5]]
    assert sorted(other.generated) == ALL_SIX
    assert "still has 3 pending groups after 0.2 s (learner.drain_timeout_s)" in caplog.text


def test_groups_that_a_draining_server_has_not_started_move_without_a_retry(tmp_path: Path) -> None:
    def drains(server: HandServer, request: Generate) -> list[Message]:
        return [GroupFailed(group_id=request.group_id, code="draining", message="scripted", retryable=True)]

    ending, other = HandServer(drains), HandServer()
    with hand_servers(ending, other), published_on(tmp_path, ending, other) as rollouts:
        assert [next_slots(rollouts), next_slots(rollouts)] == [[0, 1, 2], [3, 4, 5]]
        assert rollouts._fleet.members[0].state(0) == "draining", "a refusal reports draining too"
    assert len(ending.generated) <= 3, "no request follows a refusal"
    assert sorted(other.generated) == ALL_SIX and counts(tmp_path).lost == 0


def test_one_line_reports_the_wait_for_a_server_when_the_only_server_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    one = HandServer(is_silent)
    with hand_servers(one), published_on(tmp_path, one) as rollouts:
        fleet = rollouts._fleet
        until(lambda: len(one.generated) == 6, "all groups are pending")
        caplog.clear()
        one.is_draining = True
        until(lambda: not fleet.is_connected, "the server has reported its end")
        assert rollouts.waits_for == "6 groups from the server"
        one.close()
        until(
            lambda: [member.state(0) for member in fleet.members] == ["joining"], "the learner waits for another server"
        )
        assert rollouts.waits_for == f"the inference server at {one.endpoint}"
        assert rollouts.next_batch(0, 0.1) is None and len(rollouts._dispatcher.group_ids) == 6
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"the server at {one.endpoint} is shutting down and no other server is connected")
    assert "(learner.connect_timeout_s)" in line


# --- requests that a live server has lost ----------------------------------------------------------------------------


def test_requests_lost_by_a_live_server_are_resent_after_the_deadline_without_a_retry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loses_two(server: HandServer, request: Generate) -> list[Message]:
        is_lost = request.group_id in ("1.0", "2.0") and server.generated.count(request.group_id) == 1
        return [] if is_lost else answers(server, request)

    server = HandServer(loses_two)
    with hand_servers(server), published_on(tmp_path, server, group_idle_timeout_s=1.0) as rollouts:
        assert [next_slots(rollouts), next_slots(rollouts)] == [[0, 1, 2], [3, 4, 5]]
        assert rollouts.pop_metrics()["rollout/resent_requests"] >= 2
    assert server.generated.count("1.0") == server.generated.count("2.0") == 2
    assert (
        f"requests to the server at {server.endpoint}, such as 1.0 (no answer for 1 s, learner.group_idle_timeout_s; "
        "the server has 0 of 2 groups)" in caplog.text
    )
    assert counts(tmp_path).dropped == 0


IDLE_S = 10.0


class CountingLink:
    """Replaces a connected server: records requests, and reports a number of groups."""

    endpoint, state = "tcp://a:1", "ready"

    def __init__(self, num_held: int, counted_at: float) -> None:
        self.link, self.last_count = self, (num_held, counted_at)
        self.sent: list[str] = []

    async def generate(self, request: Any) -> bool:
        self.sent.append(request)
        return True


@pytest.mark.parametrize(
    ("ages_s", "num_held", "counted_s_ago", "resent"),
    [
        pytest.param([9.0, 9.0], 0, 0.0, [], id="no request is overdue"),
        pytest.param([11.0, 12.0], 0, 0.0, [0, 1], id="the server has lost all"),
        pytest.param([11.0, 12.0], 2, 0.0, [], id="the server has all and is paused"),
        pytest.param([11.0, 12.0, 1.0], 2, 0.0, [], id="the count misses a request in flight"),
        pytest.param([11.0, 12.0, 1.0], 1, 0.0, [0, 1], id="the server has lost one of several"),
        pytest.param([11.0, 11.2], 0, 9.0, [], id="the count is older than the requests"),
    ],
)
def test_requests_are_resent_if_overdue_and_the_server_has_too_few_groups(
    monkeypatch: pytest.MonkeyPatch, ages_s: list[float], num_held: int, counted_s_ago: float, resent: list[int]
) -> None:
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr("learner.rollouts.dispatcher.time", SimpleNamespace(monotonic=lambda: clock.now_s))
    server: Any = CountingLink(num_held, clock.now_s - counted_s_ago)
    fleet: Any = SimpleNamespace(connected=lambda: [server], choose=lambda without, stays_at: server)
    run: Any = SimpleNamespace(learner=SimpleNamespace(group_idle_timeout_s=IDLE_S))
    dispatcher = Dispatcher(run, fleet)
    requests: list[Any] = [
        SimpleNamespace(group_id=str(number), message=lambda run, number=number: number, assigned_to=None, stays_at="")
        for number in range(len(ages_s))
    ]

    async def begin_and_resend() -> None:
        await dispatcher.begin(requests)
        for request, age_s in zip(requests, ages_s, strict=True):
            request.sent_at = clock.now_s - age_s
        for _ in range(2):  # no request is overdue the second time
            await dispatcher._resend_lost(server, IDLE_S)

    asyncio.run(begin_and_resend())
    assert server.sent[len(requests) :] == resent and dispatcher.metrics["rollout/resent_requests"] == len(resent)
