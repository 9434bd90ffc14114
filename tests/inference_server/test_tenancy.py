"""Which learner holds the server: the state machine with the test's clock, and the server with a scripted engine."""

import asyncio
import itertools
import math
import os

import msgspec
import pytest

from inference_server.config import ServerConfig
from inference_server.engine.interface import EngineDead
from inference_server.tenancy import LeaseHolder, Tenancy
from inference_server.weight_update import WeightUpdates
from protocol.channel.sockets import SendResult, ServerChannel
from protocol.codec import encode
from protocol.messages import (
    PROTOCOL_VERSION,
    Group,
    GroupFailed,
    Hello,
    Message,
    ModelFingerprint,
    Pulse,
    PushFailed,
    Refused,
    Welcome,
    new_learner_id,
)
from tests.fakes import ScriptedEngine, report
from tests.fingerprint import MODEL
from tests.inference_server.scripted_server import Stage, begin, until, with_server

TIMEOUT_S = 10.0
NO_TIMEOUT = ServerConfig(orphan_timeout_s=1000.0)
"""A timeout longer than any test."""


# --- the state machine -------------------------------------------------------------------------------------------


def holder(run: str = "a", learner: str = "1", peer: bytes = b"peer") -> LeaseHolder:
    return LeaseHolder(run=run, learner=learner, peer=peer)


def test_the_states_name_the_holder_since_when_and_when_the_server_is_free() -> None:
    tenancy = Tenancy(TIMEOUT_S, now=100.0)

    def status(now: float) -> tuple[str, str | None, str | None, float, float | None]:
        return tuple(tenancy.status(now).values())  # type: ignore[return-value]

    assert status(103.0) == ("free", None, None, 3.0, 0.0) and tenancy.away_s(103.0) == math.inf
    assert tenancy.hold(holder(), 104.0)
    assert status(109.0) == ("held", "a", "1", 5.0, None) and tenancy.away_s(109.0) == 0.0
    tenancy.lose(110.0)
    tenancy.lose(112.0)  # reported repeatedly
    assert status(113.0) == ("away", "a", "1", 3.0, 7.0) and tenancy.away_s(113.0) == 3.0
    assert not tenancy.is_due(119.9) and tenancy.is_due(120.0)
    assert not tenancy.hold(holder(peer=b"another connection"), 115.0)
    assert not tenancy.hold(holder(peer=b"and another"), 115.5)  # the start time is unchanged
    assert status(116.0) == ("held", "a", "1", 1.0, None)
    tenancy.lose(116.0)
    tenancy.extend("b", 120.0)
    assert tenancy.free_in_s(120.0) == 6.0
    tenancy.extend("a", 120.0)
    assert tenancy.free_in_s(120.0) == TIMEOUT_S
    assert tenancy.away_s(120.0) == 4.0, "an unanswered Hello must not prolong a drain"
    tenancy.free(117.0)
    tenancy.extend("a", 117.0)
    assert status(118.0) == ("free", None, None, 1.0, 0.0)


@pytest.mark.parametrize(
    ("run", "learner", "is_lost", "expected"),
    [
        ("b", "2", False, "the server is busy with run a, whose learner node7:42 has held it for 7 s"),
        ("b", "node7:42:secret", False, "the server is busy with run a"),
        ("a", "2", False, "another process of run a has held the server for 7 s: node7:42 "),
        ("a", "node7:42:other", False, "the same process, node7:42, has the server already as another of the servers"),
        ("a", "node7:42:secret", False, None),
        (
            "b",
            "2",
            True,
            "kept for run a for 10 s (server.orphan_timeout_s); its learner node7:42 was last seen 7 s ago",
        ),
        ("a", "2", True, None),
        ("a", "node7:42:secret", True, None),
    ],
)
def test_a_waiting_learner_gets_the_holder_and_the_time_but_not_the_id_that_could_take_over(
    run: str, learner: str, is_lost: bool, expected: str | None
) -> None:
    tenancy = Tenancy(TIMEOUT_S, now=0.0)
    tenancy.hold(holder(learner="node7:42:secret"), 0.0)
    if is_lost:
        tenancy.lose(0.0)
    busy = tenancy.why_busy(run, learner, 7.0)
    assert (busy is None) == (expected is None)
    if busy is not None:
        assert expected is not None and expected in busy.reason
        assert busy.free_in_s == (3.0 if is_lost else None)
    assert "secret" not in f"{busy} {tenancy.status(7.0)}" and tenancy.status(7.0)["learner"] == "node7:42"


EVENTS = ("a1", "a2", "b3", "lost", "over", "4 s", "7 s")
"""A Hello of a run by a learner; the holder's connection breaks; its run ends; time passes."""


def test_after_every_history_only_the_entitled_learner_gets_the_server() -> None:
    num_waits = 0
    for events in itertools.product(EVENTS, repeat=5):
        tenancy, now, held_by, lost_at = Tenancy(TIMEOUT_S, 0.0), 0.0, "", math.inf
        for event in events:
            if event in ("4 s", "7 s"):
                now += float(event[0])
            elif event == "lost":
                tenancy.lose(now)
                lost_at = min(lost_at, now) if held_by else math.inf
            elif event == "over":
                tenancy.free(now)
                held_by, lost_at = "", math.inf
            else:
                is_kept = now < lost_at + TIMEOUT_S
                may_have_it = held_by in ("", event) or not is_kept or (held_by[0] == event[0] and lost_at <= now)
                busy = tenancy.why_busy(event[0], event[1], now)
                assert (busy is None) == may_have_it, events
                if busy is None:
                    tenancy.hold(holder(event[0], event[1]), now)
                    held_by, lost_at = event, math.inf
                else:
                    num_waits += 1
                    assert busy.free_in_s is None or 0 < busy.free_in_s <= TIMEOUT_S
            assert held_by == (tenancy.holder.run + tenancy.holder.learner if tenancy.holder else ""), events
            assert tenancy.state == ("free" if not held_by else "held" if lost_at > now else "away"), events
    assert num_waits > 1000, "too few histories with waits"


# --- the server --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pulse_often")
@with_server(config=ServerConfig(orphan_timeout_s=1.0))
async def test_a_disconnected_run_keeps_the_server_for_the_timeout_and_then_loses_its_groups(
    at: Stage,
) -> None:
    await at.join_and_push()
    await at.hold_group("g")
    rival = at.another(run="run-b")
    answer = await rival.greet()
    assert isinstance(answer, Refused) and answer.is_busy and answer.free_in_s is None
    assert f"busy with run run-a, whose learner {at.learner.learner} has held it" in answer.reason
    at.learner.channel.close()
    broke_at = asyncio.get_running_loop().time()
    waits_s = []
    while isinstance(answer := await rival.greet(), Refused):
        assert answer.is_busy
        waits_s += [] if answer.free_in_s is None else [answer.free_in_s]
        await asyncio.sleep(0.02)
    assert asyncio.get_running_loop().time() - broke_at >= 1.0 >= max(waits_s)
    await until(lambda: at.engine.cancelled == 1)
    assert at.status()["run"] == "run-b" and at.status()["groups_running"] == 0


@with_server(config=NO_TIMEOUT)
async def test_a_run_that_reconnects_in_time_finds_its_groups_and_its_rival_keeps_waiting(at: Stage) -> None:
    await at.join_and_push()
    server_id = at.status()["server_id"]
    await at.learner.group("g", [1])
    at.learner.channel.close()
    await until(lambda: at.status()["tenancy"]["state"] == "away")
    rival, restarted = at.another(run="run-b"), at.another()
    assert isinstance(await rival.greet(), Refused)
    welcome = await restarted.join()
    assert (welcome.server_id, welcome.policy_version) == (server_id, 0)
    assert (await restarted.receive(Group)).group_id == "g"
    assert isinstance(await rival.greet(), Refused)
    tenancy = at.status()["tenancy"]
    assert (tenancy["state"], tenancy["run"], tenancy["learner"]) == ("held", "run-a", restarted.learner)


@with_server(config=NO_TIMEOUT)
async def test_a_finished_run_frees_the_server_immediately_and_its_groups_are_aborted(at: Stage) -> None:
    await at.join_and_push()
    server_id = at.status()["server_id"]
    await at.hold_group("g")
    rival = at.another(run="run-b")
    assert isinstance(await rival.greet(), Refused)
    await at.learner.leave()
    assert (await rival.join()).server_id != server_id
    await until(lambda: at.engine.cancelled == 1)
    answer = await at.learner.greet()
    assert isinstance(answer, Refused) and "busy with run run-b" in answer.reason


@with_server(config=NO_TIMEOUT)
async def test_two_processes_of_one_run_do_not_take_the_server_from_each_other(at: Stage) -> None:
    await at.join_and_push()
    second = at.another(at.learner.run)
    for _ in range(3):
        answer = await second.greet()
        assert isinstance(answer, Refused) and answer.is_busy and answer.free_in_s is None
        assert "another process of run run-a has held the server" in answer.reason
        assert at.learner.learner in answer.reason
        await at.learner.generate("g", [1])
        await at.learner.receive(Pulse)
    await at.learner.receive(Group)
    at.learner.close()
    assert (await second.join()).policy_version == 0
    assert (await second.receive(Group)).group_id == "g", "the second process may be the restarted first one"
    late = at.another(at.learner.run)
    late.learner = at.learner.learner
    assert isinstance(await late.greet(), Refused), "the first process was only stopped"


@with_server(config=NO_TIMEOUT)
async def test_a_learner_that_reconnects_before_the_server_notices_is_the_same_learner(
    at: Stage,
) -> None:
    await at.join_and_push()
    again = at.another()
    again.learner = at.learner.learner
    assert isinstance(await again.greet(), Welcome)
    await again.receive(Pulse)


@pytest.mark.usefixtures("pulse_often")
@with_server(config=ServerConfig(orphan_timeout_s=1.0))
async def test_a_run_that_says_hello_while_the_engine_restarts_keeps_the_server(at: Stage) -> None:
    await at.join_and_push()
    await at.learner.group("g", [1])
    at.engine.release_restart.clear()
    at.engine.fail_with = EngineDead("scripted death")
    await until(lambda: "restart" in at.engine.calls)
    at.learner.close()
    await until(lambda: at.status()["tenancy"]["state"] == "away")
    again, rival = at.another(), at.another(run="run-b")
    for _ in range(40):
        await again.hello()
        await asyncio.sleep(0.05)
    assert isinstance(await rival.greet(), Refused)
    at.engine.release_restart.set()
    await until(lambda: at.status()["engine_restarts"] == 1)
    await again.join()
    assert (await again.receive(Group)).group_id == "g"


@pytest.mark.usefixtures("pulse_often")
@with_server(config=ServerConfig(orphan_timeout_s=0.1))
async def test_a_full_queue_is_not_a_lost_connection(at: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another process of the run could take the server from a learner on a slow link."""
    send, num_refused = ServerChannel.send, 0

    async def full(channel: ServerChannel, peer: bytes, message: Message) -> SendResult:
        nonlocal num_refused
        if isinstance(message, Pulse):
            num_refused += 1
            return SendResult.QUEUE_FULL
        return await send(channel, peer, message)

    await at.learner.join()
    monkeypatch.setattr(ServerChannel, "send", full)
    await until(lambda: num_refused > 10)
    assert at.status()["tenancy"]["state"] == "held"


@with_server(config=NO_TIMEOUT)
async def test_messages_of_other_learners_do_not_affect_the_served_learner(at: Stage) -> None:
    await at.join_and_push()
    rivals = [at.another(run=f"run-{index}") for index in range(4)]
    began_at = asyncio.get_running_loop().time()
    for _ in range(50):
        answers = await asyncio.gather(*(rival.greet() for rival in rivals))
        assert all(isinstance(answer, Refused) for answer in answers)
    await at.learner.generate("after them", [1])
    num_pulses = 0
    while not isinstance(await at.learner.receive((Pulse, Group)), Group):
        num_pulses += 1
    assert num_pulses <= 2 + (asyncio.get_running_loop().time() - began_at) / 0.4


@pytest.mark.parametrize("next_run", ["run-a", "run-b"])
@with_server(config=NO_TIMEOUT)
async def test_the_weights_of_a_finished_run_answer_under_its_name_until_the_next_push(
    at: Stage, next_run: str
) -> None:
    def served() -> tuple[str | None, int | None, str | None]:
        status = at.status()
        return status["run"], status["policy_version"], status["weights_run"]

    assert served() == (None, None, None)
    await at.join_and_push(version=7)
    assert served() == ("run-a", 7, "run-a")
    await at.learner.leave()
    second = at.another(next_run)
    welcome = await second.join()
    assert welcome.policy_version is None and not welcome.is_untouched, "weights of another run do not count"
    assert (await second.receive(Pulse)).policy_version is None
    assert served() == (next_run, 7, "run-a") and at.status()["weights_checksum"] == "c0ffee"
    await second.generate("g", [1, 2])
    assert (await second.receive(GroupFailed)).code == "not_ready"
    assert "sync weights before scoring" in ((await second.score([1, 2])).error or "")
    await at.push(0, "e2", second)
    assert served() == (next_run, 0, next_run) and (await second.join()).policy_version == 0


@with_server(config=NO_TIMEOUT)
async def test_a_push_that_ends_under_the_next_run_belongs_to_the_run_that_started_it(at: Stage) -> None:
    await at.learner.join()
    at.engine.release_pause.clear()
    at.engine.scripted_reports.append([report()])
    await at.learner.send(begin(8))
    await until(lambda: at.engine.calls == ["pause"])
    await at.learner.leave()
    second = at.another(run="run-b")
    await second.join()
    at.engine.release_pause.set()
    await until(lambda: at.status()["policy_version"] == 8)
    assert at.status()["weights_run"] == "run-a"
    await second.generate("g", [1])
    assert (await second.receive(GroupFailed)).code == "not_ready"


def test_a_push_is_not_started_after_another_run_takes_over() -> None:
    async def run() -> None:
        sent: list[Message] = []

        async def deliver(message: Message) -> bool:
            sent.append(message)
            return True

        engine = ScriptedEngine()
        pushes = WeightUpdates(engine, deliver, deliver, pause_timeout_s=60.0)
        pushes.begin_run("run-a")
        async with pushes._lock:
            pushing = asyncio.create_task(pushes.push(begin(3)))
            await asyncio.sleep(0)
            pushes.begin_run("run-b")
        await pushing
        (failed,) = sent
        assert isinstance(failed, PushFailed) and failed.weights_intact and engine.calls == []
        assert "run run-a, which started this weight sync, is no longer served" in failed.message

    asyncio.run(run())


@with_server()
async def test_a_learner_of_another_version_is_notified_in_a_message_that_it_can_read(at: Stage) -> None:
    class Hello7(msgspec.Struct, frozen=True, tag="Hello"):
        """A Hello of protocol version 7, without a learner id."""

        run: str
        protocol_version: int
        model: ModelFingerprint

    class Refused7(msgspec.Struct, frozen=True, tag="Refused", forbid_unknown_fields=True):
        reason: str

    await at.learner.channel._messages.send(encode(Hello7(run="r", protocol_version=7, model=MODEL)))
    (answer,) = await at.learner.channel._messages.receive()
    refused = msgspec.msgpack.decode(bytes(answer), type=Refused7)
    assert f"protocol version 7, the server {PROTOCOL_VERSION}; install the same" in refused.reason


def test_every_learner_process_has_a_unique_id_that_names_its_host() -> None:
    one, other = new_learner_id(), new_learner_id()
    assert one != other and f":{os.getpid()}:" in one
    Hello(run="r", protocol_version=PROTOCOL_VERSION, model=MODEL, learner=one)
