"""The fleet of a run and its event loop: waits, and errors in the background."""

import asyncio
import inspect
import logging
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_server.config import ServerConfig
from learner.sandbox.open_files import NUM_OTHER_FILES
from learner.servers.fleet import FILES_PER_LINK
from learner.servers.link import DEAD_AFTER_S, HELLO_INTERVAL_S
from learner.servers.loop_thread import LoopThread
from protocol.errors import ConfigError, DeadlineExceeded, HandshakeRefused, RewardError, ServerLost
from tests.fakes import ScriptedEngine, ServerThread
from tests.learner.model_engine import tiny_server
from tests.learner.servers.fleets import a_fleet, tenancy_of
from tests.ports import free_endpoint
from tests.waiting import TIMEOUT_S, until

NOWHERE = "tcp://127.0.0.1:1"
LOST_FOR_S = DEAD_AFTER_S + HELLO_INTERVAL_S
"""Time until a silent link is lost."""


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test")
    yield loop
    loop.stop()


def ended(loop: LoopThread) -> None:
    """Wait until all spawned tasks have started, and those that do not wait have ended."""
    for _ in range(3):
        loop.call(asyncio.sleep(0), TIMEOUT_S)


def test_the_first_failure_in_the_background_is_raised_at_the_next_call(loop: LoopThread) -> None:
    async def fail(reason: str) -> None:
        async with asyncio.TaskGroup() as tasks:  # it groups the errors of its tasks
            tasks.create_task(fail_alone(reason))

    async def fail_alone(reason: str) -> None:
        raise RewardError(reason)

    loop.raise_failure()
    loop.spawn(fail("first"))
    ended(loop)
    loop.spawn(fail("second"))
    ended(loop)
    for _ in range(2):
        with pytest.raises(RewardError, match="first"):
            loop.raise_failure()


def test_a_call_that_does_not_finish_is_named(loop: LoopThread) -> None:
    with pytest.raises(DeadlineExceeded, match=r"^Event.wait did not finish within 0.01 s$"):
        loop.call(asyncio.Event().wait(), 0.01)


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_task_spawned_while_the_loop_stops_is_cancelled(is_busy: bool) -> None:
    loop, cancelled = LoopThread("test"), []

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(TIMEOUT_S)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    if is_busy:
        loop.spawn(work("in the middle"))
        ended(loop)
    late = work("late")
    loop.loop.call_soon_threadsafe(loop.spawn, late)  # not started when the loop stops
    loop.stop()
    loop.raise_failure()
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED
    assert "in the middle" in cancelled or not is_busy


def test_a_wait_for_a_missing_server_ends_with_a_remedy_and_a_cancelled_wait_immediately(tmp_path: Path) -> None:
    closing, other = threading.Event(), free_endpoint()
    with a_fleet(tmp_path, NOWHERE, other) as fleet:
        assert not fleet.is_connected
        expected = (
            rf"no inference server answers at {NOWHERE}, {other} after 1 s.*`endpoints`.*raise "
            rf"learner\.connect_timeout_s"
        )
        with pytest.raises(DeadlineExceeded, match=expected):
            fleet.wait(closing)
        closing.set()
        with pytest.raises(ServerLost, match="stopped waiting for any of the inference servers at"):
            fleet.wait(closing)


def test_servers_that_need_too_many_open_files_are_refused_at_the_start_and_not_added_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit = NUM_OTHER_FILES + 2 * FILES_PER_LINK
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr("learner.servers.fleet.REREAD_EVERY_S", 0.05)
    endpoints = [f"tcp://127.0.0.1:{port}" for port in (1, 2, 3)]
    expected = r"^3 servers \(`endpoints`, .* need at least 94 open files.* have 2 or less"
    with pytest.raises(ConfigError, match=expected), a_fleet(tmp_path, *endpoints):
        pass
    listed = tmp_path / "servers.txt"
    listed.write_text("\n".join(endpoints[:2]))
    with a_fleet(tmp_path, listed=listed) as fleet:
        listed.write_text("\n".join(endpoints))
        until(lambda: f"not adding {endpoints[2]}" in caplog.text)
        time.sleep(0.3)  # more reads
        assert caplog.text.count("not adding") == 1
        assert [member.endpoint for member in fleet.members] == endpoints[:2]
        listed.write_text("\n".join(endpoints[1:]))
        until(lambda: [member.endpoint for member in fleet.members] == endpoints[1:])


def test_a_slow_name_server_delays_only_the_servers_that_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop answers heartbeats and receives groups, so it must go on meanwhile."""
    is_asked, has_answered = threading.Event(), threading.Event()

    def look_up(host: str) -> bool:
        if host == "localhost":
            is_asked.set()
            assert has_answered.wait(TIMEOUT_S)
        return False

    monkeypatch.setattr("protocol.channel.sockets.needs_ipv6", look_up)
    monkeypatch.setattr("learner.servers.fleet.REREAD_EVERY_S", 0.05)
    listed = tmp_path / "servers.txt"
    listed.write_text(NOWHERE)
    with a_fleet(tmp_path, listed=listed) as fleet:
        listed.write_text(f"{NOWHERE}\ntcp://localhost:1\n")
        assert is_asked.wait(TIMEOUT_S)
        ended(fleet.loop)
        assert [member.endpoint for member in fleet.members] == [NOWHERE]
        has_answered.set()
        until(lambda: [member.endpoint for member in fleet.members] == [NOWHERE, "tcp://localhost:1"])


def test_a_wait_ends_when_anything_in_the_background_fails(tmp_path: Path) -> None:
    with (
        tiny_server() as server,
        a_fleet(tmp_path, server.endpoint) as fleet,  # with another model
        pytest.raises(HandshakeRefused, match="start both with the same `model`"),
    ):
        fleet.wait()


def test_a_server_listed_again_before_the_next_reread_joins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.servers.fleet.REREAD_EVERY_S", 0.5)
    listed, told = tmp_path / "servers.txt", list[str]()
    with ServerThread(ScriptedEngine()) as server:
        listed.write_text(f"{server.endpoint}\n{NOWHERE}\n")
        with a_fleet(tmp_path, listed=listed) as fleet:
            fleet.on_change = told.append
            until(lambda: fleet.is_connected)
            listed.write_text(f"{NOWHERE}\n")
            until(lambda: f"the server at {server.endpoint}: draining → gone" in told)
            listed.write_text(f"{server.endpoint}\n{NOWHERE}\n")
            until(lambda: fleet.is_connected)


def test_a_run_waits_for_a_busy_server_and_ends_with_its_holder_and_a_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ServerThread(ScriptedEngine()) as server, a_fleet(tmp_path, server.endpoint, name="one") as fleet:
        fleet.wait()
        with (
            a_fleet(tmp_path, server.endpoint, name="other") as waiting,
            pytest.raises(
                DeadlineExceeded,
                match=r"run other waited 1 s \(learner.connect_timeout_s\) .*busy with run one, whose learner learner "
                r"of one has held it for \d+ s\. "
                r"Wait until that run is over, stop it, or start another server\. Raise learner\.connect_timeout_s to "
                r"wait longer",
            ),
        ):
            waiting.wait()
        assert fleet.is_connected and tenancy_of(server)["run"] == "one"
    lines = [line for line in caplog.messages if "is not free: the server is busy with run one" in line]
    assert len(lines) == 1 and "stops after 1 s without any server (learner.connect_timeout_s)" in lines[0]


def test_a_run_works_with_free_servers_while_it_waits_for_a_busy_one(tmp_path: Path) -> None:
    with (
        ServerThread(ScriptedEngine(), config=ServerConfig(orphan_timeout_s=1000.0)) as busy,
        ServerThread(ScriptedEngine()) as free,
        a_fleet(tmp_path, busy.endpoint, name="one") as fleet,
    ):
        fleet.wait()
        with a_fleet(tmp_path, busy.endpoint, free.endpoint, name="other") as waiting:
            told = list[str]()
            waiting.on_change = told.append
            until(lambda: waiting.members[0].link.busy is not None)
            assert [member.endpoint for member in waiting.wait()] == [free.endpoint]
            assert waiting.members[0].state(None) == "joining"
            assert any("busy with run one" in what for what in told)
            fleet.is_over = True
            fleet.leave()
            until(lambda: len(waiting.connected()) == 2)
        assert tenancy_of(busy)["run"] == "other", "its run may reconnect"
        with a_fleet(tmp_path, busy.endpoint, name="other") as resumed:
            until(lambda: resumed.is_connected)
            resumed.is_over = True
        until(lambda: tenancy_of(busy)["state"] == "free")


def test_a_server_with_two_addresses_is_kept_when_one_address_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("learner.servers.fleet.CLOSE_AFTER_S", 0.05)
    with ServerThread(ScriptedEngine()) as server:
        other_name = server.endpoint.replace("127.0.0.1", "localhost")
        with a_fleet(tmp_path, server.endpoint, other_name) as fleet:
            until(lambda: any(member.is_gone and member.link._channel._socket.closed for member in fleet.members))
            server_id = server.running.server.status()["server_id"]
            (stays,) = [member for member in fleet.members if not member.is_gone]
            # The server answers the link that greeted it last, so the other link is lost for a while.
            time.sleep(LOST_FOR_S)
            until(lambda: stays.link.connected and tenancy_of(server)["state"] == "held")
            assert stays.welcome is not None and stays.welcome.server_id == server_id
            assert "run r is over" not in caplog.text
