"""Which server is asked for which group: hand-driven servers on real sockets, lost, late and behind."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from learner.rollouts.rollouts import Rollouts
from learner.servers.fleet import Fleet
from protocol.config import DEFAULT_ENDPOINT
from protocol.messages import Generate, GroupFailed, Hello, Message
from tests.learner.rollouts.test_rollouts import TIMEOUT_S, HandServer, counts, group_of, rollouts_of, slots
from tests.learner.runs import make_run
from tests.link import Link


def answers(server: HandServer, request: Generate) -> list[Message]:
    return [group_of(request, server.version)]


def is_silent(server: HandServer, request: Generate) -> list[Message]:
    return []


class Late(HandServer):
    """Silent at first; when it is greeted again it answers all that it was asked before."""

    def _answers(self, message: object) -> list[Message]:
        late = [group_of(request, 0) for request in self.requests] if isinstance(message, Hello) else []
        return super()._answers(message) + late


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@contextmanager
def rollouts_on(tmp_path: Path, *endpoints: str, **learner: object) -> Iterator[tuple[Fleet, Rollouts]]:
    run = make_run(tmp_path, *endpoints, steps=10, max_staleness=1, **learner)
    with rollouts_of(run) as (fleet, rollouts):
        rollouts.start(0)
        until(lambda: len(fleet.connected()) == len(endpoints), "all are connected")
        yield fleet, rollouts


@contextmanager
def rollouts_on_listed(tmp_path: Path, *endpoints: str, **learner: object) -> Iterator[tuple[Path, Fleet, Rollouts]]:
    """On the endpoints of a file, which is read again all the time."""
    listed = tmp_path / "servers.txt"
    listed.write_text("\n".join(endpoints))
    run = make_run(tmp_path, DEFAULT_ENDPOINT, steps=10, max_staleness=1, **learner)
    with rollouts_of(msgspec.structs.replace(run, endpoints_from=f"file:{listed}")) as (fleet, rollouts):
        rollouts.start(0)
        until(lambda: len(fleet.connected()) == len(endpoints), "all are connected")
        yield listed, fleet, rollouts


@contextmanager
def hand_servers(*servers: HandServer) -> Iterator[None]:
    with ExitStack() as cleanup:
        for number, server in enumerate(servers):
            server.server_id = f"server-{number}"
            cleanup.enter_context(server)
        yield


def test_groups_are_shared_out_evenly(tmp_path: Path) -> None:
    one, other = HandServer(is_silent), HandServer(is_silent)
    with hand_servers(one, other), rollouts_on(tmp_path, one.endpoint, other.endpoint) as (_, rollouts):
        rollouts.publish(0, "server-0", "server-1")
        until(lambda: len(one.generated) == len(other.generated) == 3, "each is asked for three of six")
    assert sorted(one.generated + other.generated) == [f"{slot}.0" for slot in range(6)]
    assert sorted(one.cancelled) == sorted(other.cancelled) == [f"{slot}.0" for slot in range(6)]


def test_what_a_lost_server_owes_is_asked_for_elsewhere_under_the_same_ids(tmp_path: Path) -> None:
    one, other = HandServer(is_silent), HandServer(answers)
    with hand_servers(one, other), rollouts_on(tmp_path, one.endpoint, other.endpoint) as (fleet, rollouts):
        rollouts.publish(0, "server-0", "server-1")
        until(lambda: len(one.generated) == 3, "it owes three")
        one.close()
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2]
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [3, 4, 5]
        assert [member.state(0) for member in fleet.members] == ["joining", "ready"]
    assert sorted(other.generated) == [f"{slot}.0" for slot in range(6)]
    assert counts(tmp_path).lost == 0


def test_a_late_answer_of_a_server_that_was_given_up_is_only_acknowledged(tmp_path: Path) -> None:
    late, other = Late(is_silent), HandServer(answers)
    with hand_servers(late, other):
        wire = Link(int(late.endpoint.rpartition(":")[2]))
        with rollouts_on(tmp_path, f"tcp://127.0.0.1:{wire.port}", other.endpoint) as (_, rollouts):
            rollouts.publish(0, "server-0", "server-1")
            until(lambda: len(late.generated) == 3, "it owes three")
            asked = list(late.generated)
            wire.cut()
            assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2]
            assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [3, 4, 5]
            wire.restore()
            until(lambda: set(late.acked) == set(asked), "what came late is acknowledged")
            assert rollouts.next_batch(0, 0.3) is None
            assert counts(tmp_path).admitted == 6
        wire.close()
    assert sorted(other.acked) == [f"{slot}.0" for slot in range(6)]


def test_whoever_comes_back_first_answers_and_the_other_is_only_acknowledged(tmp_path: Path) -> None:
    late, other = Late(is_silent), HandServer(is_silent)
    with hand_servers(late, other):
        wire = Link(int(late.endpoint.rpartition(":")[2]))
        with rollouts_on(tmp_path, f"tcp://127.0.0.1:{wire.port}", other.endpoint) as (_, rollouts):
            rollouts.publish(0, "server-0", "server-1")
            until(lambda: len(late.generated) == 3, "it owes three")
            wire.cut()
            until(lambda: len(other.generated) == 6, "all are asked for elsewhere")
            wire.restore()
            until(lambda: len(late.acked) == 3, "it answers first")
            other._answer = answers
            until(lambda: rollouts._buffer.num("admitted", "requested") == 3, "three are still owed")
            assert rollouts._dispatcher.num_pending.total() == 3
        wire.close()


class Regretful(HandServer):
    """When it is greeted again it says that all it was asked before has failed."""

    def _answers(self, message: object) -> list[Message]:
        failed: list[Message] = [
            GroupFailed(group_id=request.group_id, code="engine_error", message="scripted", retryable=True)
            for request in (self.requests if isinstance(message, Hello) else [])
        ]
        return super()._answers(message) + failed


def test_a_late_failure_of_what_another_server_owes_by_now_changes_nothing(tmp_path: Path) -> None:
    late, other = Regretful(is_silent), HandServer(is_silent)
    with hand_servers(late, other):
        wire = Link(int(late.endpoint.rpartition(":")[2]))
        with rollouts_on(tmp_path, f"tcp://127.0.0.1:{wire.port}", other.endpoint) as (fleet, rollouts):
            rollouts.publish(0, "server-0", "server-1")
            until(lambda: len(late.generated) == 3, "it owes three")
            wire.cut()
            until(lambda: len(other.generated) == 6, "all are asked for elsewhere")
            wire.restore()
            until(lambda: fleet.members[0].state(0) == "ready", "it is back")
            assert rollouts.next_batch(0, 0.5) is None
            assert sorted(rollouts._dispatcher.group_ids) == [f"{slot}.0" for slot in range(6)]
        wire.close()


def test_a_server_that_lacks_the_version_is_asked_for_nothing_until_it_has_it(tmp_path: Path) -> None:
    one, other = HandServer(answers), HandServer(answers)
    with hand_servers(one, other), rollouts_on(tmp_path, one.endpoint, other.endpoint) as (fleet, rollouts):
        rollouts.publish(0, "server-1")
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2] and slots(rollouts.next_batch(0, TIMEOUT_S)) == [
            3,
            4,
            5,
        ]
        assert one.generated == [] and [member.state(0) for member in fleet.members] == ["syncing", "ready"]
        one.version = 1
        rollouts.publish(1, "server-0")
        assert slots(rollouts.next_batch(1, TIMEOUT_S)) == [6, 7, 8]
        assert sorted(one.generated) == ["6.0", "7.0", "8.0"] and len(other.generated) == 6
        one.version = other.version = 2
        rollouts.publish(2, "server-0", "server-1")
        assert slots(rollouts.next_batch(2, TIMEOUT_S)) == [9, 10, 11]
        assert len(one.generated) in (4, 5) and len(one.generated) + len(other.generated) == 12


def test_a_server_that_was_dropped_is_not_asked_though_it_is_connected(tmp_path: Path) -> None:
    one, other = HandServer(is_silent), HandServer(answers)
    with hand_servers(one, other), rollouts_on(tmp_path, one.endpoint, other.endpoint) as (fleet, rollouts):
        rollouts.publish(0, "server-0", "server-1")
        until(lambda: len(one.generated) == 3, "it owes three")
        fleet.drop(fleet.members[0])
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2] and slots(rollouts.next_batch(0, TIMEOUT_S)) == [
            3,
            4,
            5,
        ]
        assert fleet.members[0].state(0) == "syncing" and len(one.generated) == 3


def test_capacity_is_that_of_all_ready_servers(tmp_path: Path) -> None:
    one, other = HandServer(is_silent, max_concurrent_sequences=8), HandServer(is_silent, max_concurrent_sequences=24)
    with hand_servers(one, other), rollouts_on(tmp_path, one.endpoint, other.endpoint) as (_, rollouts):
        rollouts.publish(0, "server-1")
        until(lambda: rollouts._buffer._max_running == 24 / 4, "one is ready")
        rollouts.publish(0, "server-0")
        until(lambda: rollouts._buffer._max_running == 32 / 4, "both are")
        one.close()
        until(lambda: rollouts._buffer._max_running == 24 / 4, "one is gone")


def test_a_server_that_is_taken_out_finishes_what_it_owes_and_is_asked_for_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.servers.fleet.REREAD_EVERY_S", 0.05)
    monkeypatch.setattr("learner.servers.fleet.CLOSE_AFTER_S", 0.05)
    late, other = Late(is_silent), HandServer(answers)
    with (
        hand_servers(late, other),
        rollouts_on_listed(tmp_path, late.endpoint, other.endpoint) as (listed, fleet, rollouts),
    ):
        rollouts.publish(0, "server-0", "server-1")
        until(lambda: len(late.generated) == 3 and len(other.acked) == 3, "each is asked for three")
        leaving = fleet.members[0]
        listed.write_text(other.endpoint)
        until(lambda: leaving.state(0) == "draining", "it is taken out")
        assert rollouts.next_batch(0, 0.3) is None and leaving.state(0) == "draining" and len(other.generated) == 3
        rollouts._loop.call(leaving.link._channel.send(fleet.hello, TIMEOUT_S), TIMEOUT_S)  # it answers then
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2] and slots(rollouts.next_batch(0, TIMEOUT_S)) == [
            3,
            4,
            5,
        ]
        until(lambda: leaving.state(0) == "gone" and len(fleet.members) == 1, "it is gone")
        until(lambda: leaving.link._channel._socket.closed, "it may serve another run")
    assert len(late.generated) == 3 and sorted(late.acked + other.acked)[:6] == [f"{slot}.0" for slot in range(6)]


def test_a_server_that_is_taken_out_and_does_not_finish_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("learner.servers.fleet.REREAD_EVERY_S", 0.05)
    one, other = HandServer(is_silent), HandServer(answers)
    with (
        hand_servers(one, other),
        rollouts_on_listed(tmp_path, one.endpoint, other.endpoint, drain_timeout_s=0.2) as (listed, _, rollouts),
    ):
        rollouts.publish(0, "server-0", "server-1")
        until(lambda: len(one.generated) == 3, "it owes three")
        listed.write_text(other.endpoint)
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2] and slots(rollouts.next_batch(0, TIMEOUT_S)) == [
            3,
            4,
            5,
        ]
    assert sorted(other.generated) == [f"{slot}.0" for slot in range(6)]
    assert "still has 3 pending groups after 0.2 s (learner.drain_timeout_s)" in caplog.text


def drains(server: HandServer, request: Generate) -> list[Message]:
    return [GroupFailed(group_id=request.group_id, code="draining", message="scripted", retryable=True)]


def test_a_server_that_says_that_it_ends_finishes_what_it_owes_and_is_follpending_at_another_at_its_endpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    late, other = Late(is_silent), HandServer(answers)
    with hand_servers(late, other), rollouts_on(tmp_path, late.endpoint, other.endpoint) as (fleet, rollouts):
        told = list[str]()
        fleet.on_change = told.append
        rollouts.publish(0, "server-0", "server-1")
        until(lambda: len(late.generated) == 3 and len(other.acked) == 3, "each is asked for three")
        leaving, late.is_draining = fleet.members[0], True
        until(lambda: leaving.state(0) == "draining", "it has said so")
        assert rollouts.next_batch(0, 0.3) is None and len(other.generated) == 3 and leaving in fleet.members
        rollouts._loop.call(leaving.link._channel.send(fleet.hello, TIMEOUT_S), TIMEOUT_S)  # it answers then
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2] and slots(rollouts.next_batch(0, TIMEOUT_S)) == [
            3,
            4,
            5,
        ]
        until(lambda: len(late.acked) == 3, "all that it gave is acknowledged")
        late.close()
        until(lambda: leaving.state(0) == "gone", "it has ended")
        until(lambda: [member.state(0) for member in fleet.members] == ["ready", "joining"], "another is waited for")
        assert fleet.members[1].endpoint == late.endpoint and len(late.generated) == 3
    told = [what for what in told if late.endpoint in what][-2:]
    assert told == [f"the server at {late.endpoint}: {change}" for change in ("ready → draining", "draining → gone")]
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_what_a_server_that_ends_has_not_started_is_asked_for_elsewhere_and_costs_no_attempt(tmp_path: Path) -> None:
    ending, other = HandServer(drains), HandServer(answers)
    with hand_servers(ending, other), rollouts_on(tmp_path, ending.endpoint, other.endpoint) as (fleet, rollouts):
        rollouts.publish(0, "server-0", "server-1")
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2] and slots(rollouts.next_batch(0, TIMEOUT_S)) == [
            3,
            4,
            5,
        ]
        assert fleet.members[0].state(0) == "draining", "its refusal says so too"
    assert len(ending.generated) <= 3, "it is asked for nothing more once it has refused"
    assert sorted(other.generated) == [f"{slot}.0" for slot in range(6)]
    assert counts(tmp_path).lost == 0


def test_a_server_that_says_that_it_ends_and_does_not_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, other = HandServer(is_silent), HandServer(answers)
    with hand_servers(one, other):
        run = make_run(tmp_path, one.endpoint, other.endpoint, steps=10, max_staleness=1, drain_timeout_s=0.2)
        with rollouts_of(run) as (fleet, rollouts):
            rollouts.start(0)
            until(lambda: len(fleet.connected()) == 2, "both are connected")
            rollouts.publish(0, "server-0", "server-1")
            until(lambda: len(one.generated) == 3, "it owes three")
            one.is_draining = True
            assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2] and slots(
                rollouts.next_batch(0, TIMEOUT_S)
            ) == [3, 4, 5]
    assert sorted(other.generated) == [f"{slot}.0" for slot in range(6)]
    assert "still has 3 pending groups after 0.2 s (learner.drain_timeout_s)" in caplog.text


def test_a_draining_server_is_waited_for_as_the_server_until_it_has_ended(tmp_path: Path) -> None:
    one = HandServer(is_silent)
    with hand_servers(one), rollouts_on(tmp_path, one.endpoint) as (fleet, rollouts):
        rollouts.publish(0, "server-0")
        until(lambda: len(one.generated) == 6, "it owes all")
        one.is_draining = True
        until(lambda: not fleet.is_connected, "it has said so")
        assert rollouts.waits_for == "6 groups from the server"
        one.close()
        until(lambda: [member.state(0) for member in fleet.members] == ["joining"], "another is waited for")
        assert rollouts.waits_for == f"the inference server at {one.endpoint}"


def test_when_the_only_server_ends_one_line_says_that_another_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    one = HandServer(is_silent)
    with hand_servers(one), rollouts_on(tmp_path, one.endpoint) as (fleet, rollouts):
        rollouts.publish(0, "server-0")
        until(lambda: len(one.generated) == 6, "it owes all")
        caplog.clear()
        one.is_draining = True
        until(lambda: not fleet.is_connected, "it has said so")
        one.close()
        until(lambda: [member.state(0) for member in fleet.members] == ["joining"], "another is waited for")
        assert rollouts.next_batch(0, 0.1) is None and len(rollouts._dispatcher.group_ids) == 6
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"the server at {one.endpoint} is shutting down and no other server is connected")
    assert "(learner.connect_timeout_s)" in line


DEADLINE_S = 0.6


def loses_first(*lost: str) -> Callable[[HandServer, Generate], list[Message]]:
    """A server that drops the first Generate of some groups, without a word, and answers all others."""

    def answer(server: HandServer, request: Generate) -> list[Message]:
        return answers(server, request) if server.generated.count(request.group_id) > (request.group_id in lost) else []

    return answer


def test_what_a_live_server_has_lost_is_asked_of_it_again_after_the_deadline_and_costs_no_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = HandServer(loses_first("1.0", "2.0"))
    with hand_servers(server), rollouts_on(tmp_path, server.endpoint, group_idle_timeout_s=DEADLINE_S) as (_, rollouts):
        rollouts.publish(0, "server-0")
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2] and slots(rollouts.next_batch(0, TIMEOUT_S)) == [
            3,
            4,
            5,
        ]
        assert rollouts.batch_metrics["rollout/resent_requests"] == 2
    assert sorted(server.generated) == ["0.0", "1.0", "1.0", "2.0", "2.0", "3.0", "4.0", "5.0"]
    (line,) = [record.getMessage() for record in caplog.records if "resending" in record.getMessage()]
    assert line == (
        f"resending 2 requests to the server at {server.endpoint}, such as 1.0 (no answer for 0.6 s, "
        "learner.group_idle_timeout_s; the server has 0 of 2 groups)"
    )
    assert counts(tmp_path).dropped == 0


def test_a_server_that_has_all_it_owes_is_not_asked_again_however_long_it_pauses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def counts_and_is_silent(server: HandServer, request: Generate) -> list[Message]:
        server.num_running = len(set(server.generated))
        return []

    server = HandServer(counts_and_is_silent)
    with hand_servers(server), rollouts_on(tmp_path, server.endpoint, group_idle_timeout_s=DEADLINE_S) as (_, rollouts):
        rollouts.publish(0, "server-0")
        assert rollouts.next_batch(0, 5 * DEADLINE_S) is None
        server.version = 1
        rollouts.publish(1, "server-0")
        until(lambda: len(server.generated) >= 9, "more is asked of it, which its last count lacks")
        assert rollouts.next_batch(0, 5 * DEADLINE_S) is None
        assert sorted(server.generated) == [f"{slot}.0" for slot in range(9)]
        assert "resending" not in caplog.text
        server.num_running = 8  # it has lost one, and nobody knows which
        until(lambda: len(server.generated) >= 18, "all are asked for again")
        assert rollouts.next_batch(0, 5 * DEADLINE_S) is None and len(server.generated) == 18
    assert sorted(server.generated) == sorted(2 * [f"{slot}.0" for slot in range(9)])


def test_what_a_server_loses_again_and_again_is_asked_for_once_in_a_deadline(tmp_path: Path) -> None:
    server = HandServer(is_silent)
    with hand_servers(server), rollouts_on(tmp_path, server.endpoint, group_idle_timeout_s=DEADLINE_S) as (_, rollouts):
        rollouts.publish(0, "server-0")
        started = time.monotonic()
        until(lambda: len(server.generated) >= 18, "asked for, and again, and again")
        assert time.monotonic() - started > 2 * DEADLINE_S
