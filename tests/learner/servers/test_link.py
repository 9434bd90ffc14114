"""The link to a server that is slow, silent, restarted or refuses: every wait ends, and says what happened."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

from inference_server.config import ServerConfig
from inference_server.engine.interface import EngineDead, EngineFailed
from learner.servers import link as link_module
from learner.servers.link import ServerLink
from protocol.errors import DeadlineExceeded, HandshakeRefused, PushError, ScoringFailed, ServerLost
from protocol.messages import (
    PROTOCOL_VERSION,
    Generate,
    Hello,
    Manifest,
    PushBegin,
    PushReady,
    Refused,
    Rendezvous,
    Sampling,
)
from tests.event_loop import in_event_loop
from tests.fakes import ScriptedEngine, Serving, report, serving
from tests.fingerprint import MODEL
from tests.link import Link
from tests.ports import free_endpoint
from tests.waiting import TIMEOUT_S
from tests.waiting import until_in_loop as until

# The scripted engine reports on a push without joining anything.
NOWHERE = Rendezvous(transport="tcp", host="127.0.0.1", port=1, world_size=2, timeout_s=1.0)
NOTHING = Manifest(tensors=(), bucket_bytes=1)


class OnALink(NamedTuple):
    link: ServerLink
    engine: ScriptedEngine
    server: Serving


Test = Callable[..., Coroutine[Any, Any, None]]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BUSY_INTERVAL_S", 0.05)
    monkeypatch.setattr(link_module, "HELLO_INTERVAL_S", 0.05)
    monkeypatch.setattr("inference_server.server.PULSE_INTERVAL_S", 0.05)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a silence."""
    monkeypatch.setattr(link_module, "DEAD_AFTER_S", 10 * TIMEOUT_S)


def on_a_link(test: Test) -> Callable[[], None]:
    """A test of a link that is welcome at a scripted server which already serves version 0."""

    async def run() -> None:
        engine = ScriptedEngine()
        async with serving(engine) as server, link_to(server.endpoint) as link:
            await until(lambda: link.connected)
            engine.scripted_reports = [[report()]]
            await link.begin_push(PushBegin(session="e", version=0, rendezvous=NOWHERE, manifest=NOTHING), TIMEOUT_S)
            await link.finish_push("e")
            await test(OnALink(link, engine, server))

    run.__name__ = test.__name__
    return in_event_loop(run)


@asynccontextmanager
async def linked(wire: Link) -> AsyncIterator[ServerLink]:
    """A link over a wire that may be cut; closes both."""
    async with link_to(f"tcp://127.0.0.1:{wire.port}") as link:
        yield link
    wire.close()


@asynccontextmanager
async def link_to(endpoint: str, run: str = "r", learner: str = "l") -> AsyncIterator[ServerLink]:
    """A link of some learner process. Raises what it has ended with by itself."""
    hello = Hello(run=run, protocol_version=PROTOCOL_VERSION, model=MODEL, learner=learner)
    link = ServerLink(endpoint, hello)
    task = asyncio.create_task(link.run())
    try:
        yield link
        if task.done():
            await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        link.close()


@on_a_link
async def test_a_score_comes_with_its_version_or_an_error_that_says_why(at: OnALink) -> None:
    scores = await at.link.score([1, 2, 3], TIMEOUT_S)
    assert scores.policy_version == 0 and scores.logprobs.tolist() == [-0.5, -0.5]
    at.engine.release.clear()
    with pytest.raises(DeadlineExceeded, match=r"did not score 3 tokens within 0\.3 s"):
        await at.link.score([1, 2, 3], 0.3)
    at.engine.release.set()
    at.engine.fail_with = EngineFailed("scripted failure")
    with pytest.raises(ScoringFailed, match="cannot score 3 tokens: scripted failure"):
        await at.link.score([1, 2, 3], TIMEOUT_S)


@on_a_link
async def test_replies_to_a_push_that_nobody_waits_for_any_more_are_not_those_to_the_next(at: OnALink) -> None:
    at.engine.release_pause.clear()
    push = asyncio.create_task(at.link.begin_push(PushBegin(session="e", version=1), 600))
    await until(lambda: at.engine.calls[-1] == "pause")
    push.cancel()
    at.engine.release_pause.set()
    at.engine.scripted_reports = [[report()], [report()]]
    await at.link.begin_push(PushBegin(session="f", version=1, rendezvous=NOWHERE, manifest=NOTHING), TIMEOUT_S)
    assert (await at.link.finish_push("f")).version == 1


@pytest.mark.usefixtures("hasty")
@on_a_link
async def test_heartbeats_add_up_the_time_without_a_group(at: OnALink) -> None:
    await until(lambda: at.link.idle_time[1] > 0.5)
    idle_s, observed_s = at.link.idle_time
    assert idle_s == pytest.approx(observed_s, abs=0.3)
    at.engine.release.clear()
    sampling, ids = Sampling(num_completions=1, max_tokens=4), np.array([1], np.int32)
    await at.link.generate(Generate(group_id="0.0", prompt_token_ids=ids, sampling=sampling, deadline_s=60.0))
    await until(lambda: at.link.last_count[0] == 1)
    idle_s, observed_s = at.link.idle_time
    await until(lambda: at.link.idle_time[1] > observed_s + 0.5)
    assert at.link.idle_time[0] == pytest.approx(idle_s, abs=0.01)


@on_a_link
async def test_a_group_whose_ack_could_not_be_sent_is_not_counted_as_one_that_the_server_owes(at: OnALink) -> None:
    at.engine.release.clear()
    sampling, ids = Sampling(num_completions=1, max_tokens=4), np.array([1], np.int32)
    for group_id in ("0.0", "1.0"):
        await at.link.generate(Generate(group_id=group_id, prompt_token_ids=ids, sampling=sampling, deadline_s=60.0))
    await until(lambda: at.link.last_count[0] == 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(at.link, "_try_send", lambda *_: asyncio.sleep(0, False))
        at.engine.release.set()
        await until(lambda: at.server.server.status()["groups_unacked"] == 2)
        await at.link.acknowledge(["0.0"])
        await until(lambda: at.link.last_count[0] == 1)
    await at.link.acknowledge(["1.0"])
    await until(lambda: at.link.last_count[0] == 0)


@on_a_link
async def test_a_server_that_dies_during_a_request_is_noticed_long_before_the_deadline(at: OnALink) -> None:
    at.engine.release.clear()
    at.engine.release_pause.clear()
    score = asyncio.create_task(at.link.score([1, 2, 3], 600))
    push = asyncio.create_task(at.link.begin_push(PushBegin(session="e", version=1), 600))
    await until(lambda: at.engine.calls[-1] == "pause")
    at.server.task.cancel()
    with pytest.raises(ServerLost, match="went away before it scored"):
        await score
    with pytest.raises(PushError, match="went away before PushReady"):
        await push
    assert not at.link.connected


@on_a_link
async def test_an_engine_that_dies_during_a_request_is_noticed_at_once_and_the_next_one_is_another_server(
    at: OnALink,
) -> None:
    for gate in (at.engine.release, at.engine.release_pause, at.engine.release_restart):
        gate.clear()
    assert at.link.welcome is not None
    first_id = at.link.welcome.server_id
    score = asyncio.create_task(at.link.score([1, 2, 3], 600))
    push = asyncio.create_task(at.link.begin_push(PushBegin(session="e", version=1), 600))
    await until(lambda: at.engine.calls.count("pause") == 2)
    at.engine.fail_with = EngineDead("it is gone")
    with pytest.raises(ServerLost, match="went away before it scored"):
        await score
    with pytest.raises(PushError, match="went away before PushReady"):
        await push
    assert not at.link.connected and at.link.welcome.server_id == first_id
    at.engine.release_restart.set()
    await until(lambda: at.link.connected)
    assert at.link.welcome.server_id != first_id


@on_a_link
async def test_an_answer_that_may_be_lost_over_a_reconnect_is_not_waited_for(at: OnALink) -> None:
    at.engine.release.clear()
    score = asyncio.create_task(at.link.score([1, 2, 3], 600))
    await asyncio.sleep(0.1)
    assert at.link.welcome is not None
    at.link._connected = False  # a silence, and the same server's welcome after it
    at.link._welcomed(at.link.welcome)
    with pytest.raises(ServerLost):
        await score
    assert at.link.connected


@pytest.mark.usefixtures("patient")
@in_event_loop
async def test_a_broken_connection_is_noticed_before_the_silence() -> None:
    async with serving(ScriptedEngine()) as server:
        wire = Link(int(server.endpoint.rpartition(":")[2]))
        async with linked(wire) as link:
            await until(lambda: link.connected)
            wire.cut()
            await until(lambda: not link.connected)
            wire.restore()
            await until(lambda: link.connected)


@pytest.mark.usefixtures("patient", "hasty")
@in_event_loop
async def test_connections_that_broke_before_the_welcome_do_not_end_the_one_it_came_over() -> None:
    async with serving(ScriptedEngine()) as server:
        wire = Link(int(server.endpoint.rpartition(":")[2]))
        wire.cut()
        async with linked(wire) as link:
            await asyncio.sleep(0.5)  # some attempts
            wire.restore()
            await until(lambda: link.connected)
            assert link._channel.num_broken > 0
            await asyncio.sleep(0.5)  # until after the next looks
            assert link.connected and link._connection == 1


@on_a_link
async def test_a_reply_that_is_replayed_neither_ends_a_push_nor_is_kept(at: OnALink) -> None:
    at.engine.scripted_reports = [[report()]]
    await at.link.begin_push(PushBegin(session="f", version=1, rendezvous=NOWHERE, manifest=NOTHING), TIMEOUT_S)
    for session in ("e", "f"):
        at.link._dispatch(PushReady(session=session, version=1))
        at.link._dispatch(PushReady(session=session, version=0))
    assert at.link._push_replies.qsize() <= 2
    assert (await at.link.finish_push("f")).version == 1


@on_a_link
async def test_a_push_without_an_answer_names_the_knob(at: OnALink) -> None:
    at.engine.release_pause.clear()
    begin = PushBegin(session="e", version=7, rendezvous=NOWHERE, manifest=NOTHING)
    with pytest.raises(DeadlineExceeded, match=r"no PushReady for version 7 .*learner\.weight_sync\.timeout_s"):
        await at.link.begin_push(begin, 0.2)


@pytest.mark.usefixtures("hasty")
@in_event_loop
async def test_a_refusal_ends_the_link_with_the_servers_reason() -> None:
    async with serving(ScriptedEngine()) as server:
        hello = Hello(run="r", protocol_version=PROTOCOL_VERSION + 1, model=MODEL, learner="l")
        link = ServerLink(server.endpoint, hello)
        try:
            with pytest.raises(ExceptionGroup) as caught:
                await asyncio.wait_for(link.run(), TIMEOUT_S)
            assert caught.group_contains(
                HandshakeRefused, match=f"protocol version {PROTOCOL_VERSION + 1}.*install the same"
            )
        finally:
            link.close()


# --- a server that another learner has ---------------------------------------------------------------------------


def num_busy_answers(server: Serving) -> int:
    assert server.server.status()["messages_refused"] == 0, "who waits its turn does nothing wrong"
    return server.server.status()["busy_answers"]


@pytest.mark.usefixtures("hasty")
@in_event_loop
async def test_a_link_waits_for_a_server_that_another_run_has_and_gets_it_when_that_is_over() -> None:
    told: list[Refused] = []
    async with (
        serving(ScriptedEngine(), ServerConfig(orphan_timeout_s=10 * TIMEOUT_S)) as server,
        link_to(server.endpoint, "one") as one,
    ):
        await until(lambda: one.connected)
        async with link_to(server.endpoint, "other") as other:
            other.on_busy = told.append
            await until(lambda: num_busy_answers(server) >= 5)
            assert not other.connected and other.busy is not None and "busy with run one" in other.busy.reason
            assert one.connected and one._connection == 1
            await one.leave()
            await until(lambda: other.connected)
            assert other.busy is None and len(told) == 1
            before = num_busy_answers(server)
            one._connected = False  # as after the silence of a server that does not pulse for it any more
            await asyncio.sleep(0.3)
            assert num_busy_answers(server) == before, "the one that has left says Hello no more"


@in_event_loop
async def test_a_link_that_leaves_before_its_welcome_arrives_frees_the_server() -> None:
    async with serving(ScriptedEngine(), ServerConfig(orphan_timeout_s=10 * TIMEOUT_S)) as server:
        link = ServerLink(server.endpoint, Hello(run="r", protocol_version=PROTOCOL_VERSION, model=MODEL, learner="l"))
        greeting = asyncio.create_task(link._stay_connected())  # without _receive
        await until(lambda: server.server.status()["tenancy"]["state"] == "held")
        assert link.welcome is None
        greeting.cancel()
        await link.leave()
        link.close()
        await until(lambda: server.server.status()["tenancy"]["state"] == "free")


@pytest.mark.usefixtures("hasty")
@in_event_loop
async def test_a_link_that_was_welcomed_before_waits_while_another_run_has_its_server() -> None:
    async with serving(ScriptedEngine(), ServerConfig(orphan_timeout_s=0.2)) as server:
        wire = Link(int(server.endpoint.rpartition(":")[2]))
        async with linked(wire) as link:
            await until(lambda: link.connected)
            assert link.welcome is not None
            first_id = link.welcome.server_id
            wire.cut()
            async with link_to(server.endpoint, "rival", "another") as rival:
                await until(lambda: rival.connected)
                wire.restore()
                await until(lambda: link.busy is not None)
                assert not link.connected
                await rival.leave()
                await until(lambda: link.connected)
            assert link.welcome.server_id != first_id, "its weights and groups are gone"


@in_event_loop
async def test_a_server_that_is_started_again_goes_to_the_run_that_had_it_not_to_one_that_waits() -> None:
    endpoint = free_endpoint()
    async with contextlib.AsyncExitStack() as first:
        await first.enter_async_context(serving(ScriptedEngine(), endpoint=endpoint))
        async with link_to(endpoint, "one") as one, link_to(endpoint, "rival", "another") as rival:
            await until(lambda: one.connected or rival.connected)
            has, waits = (one, rival) if one.connected else (rival, one)
            await until(lambda: waits.busy is not None)
            await first.aclose()
            for away_s in (0.0, 1.0):  # the first to come back is found by chance, so several times
                await until(lambda: not has.connected)
                await asyncio.sleep(away_s)
                async with serving(ScriptedEngine(), endpoint=endpoint):
                    await until(lambda: has.connected or waits.connected)
                    assert has.connected
                    await until(lambda: waits._busy is not None and waits._busy[1] > time.monotonic() - 0.5)
                    assert not waits.connected


@in_event_loop
async def test_a_server_that_is_free_soon_is_asked_then_and_any_other_after_a_second() -> None:
    link = ServerLink("tcp://127.0.0.1:1", Hello(run="r", protocol_version=PROTOCOL_VERSION, model=MODEL))
    for free_in_s, expected_s in ((None, 1.0), (25.0, 1.0), (0.3, 0.3), (0.0, 0.0)):
        before = time.monotonic()
        link._dispatch(Refused(reason="busy", is_busy=True, free_in_s=free_in_s))
        assert expected_s <= link._hello_at - before < expected_s + 1.0
    link.close()
