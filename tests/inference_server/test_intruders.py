"""Who may talk to the server: listed keys, over real sockets, while processes without one knock, shout and flood."""

import asyncio
import json
import logging
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from learner.servers.link import ServerLink
from protocol.channel.keys import LearnerKeys, ServerKeys, learner_keys, make_keys, server_keys
from protocol.errors import ConfigError, DeadlineExceeded, HandshakeRefused
from protocol.messages import PROTOCOL_VERSION, Ack, Group, Hello, Manifest, Pulse, PushBegin, PushDone, Rendezvous
from tests.fakes import ScriptedEngine, Serving, report, serving
from tests.fingerprint import MODEL
from tests.inference_server.scripted_learner import ScriptedLearner

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 60.0
INTRUSION_S = 3.0
MAX_GROWTH_BYTES = 64 << 20
"""The intruders try to place many times as much in the server's memory."""
MAX_MORE_FILES = 10
"""The intruders try to open 50 at once; asyncio opens a few of its own to start them."""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def wrong_keys(tmp_path: Path, keys: Path, request: pytest.FixtureRequest) -> Path:
    """Keys with a learner that is not listed, or with the public key of another server."""
    wrong = tmp_path / "wrong"
    make_keys(wrong)
    replaced = {"unknown key": "server.pub", "another server": "learner.key"}[request.param]
    (wrong / replaced).write_bytes((keys / replaced).read_bytes())
    return wrong


async def intrude(kind: str, endpoint: str, *more: str, limit_s: float = INTRUSION_S) -> dict[str, int]:
    """Run intruders for `limit_s`, or until they are done if that is sooner."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.protocol.intruder", kind, endpoint, str(limit_s), *more,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S + limit_s)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    return json.loads(output)


async def push(engine: ScriptedEngine, learner: ScriptedLearner) -> None:
    """Be welcomed and give the engine weights, without any transport."""
    await learner.join()
    engine.scripted_reports.append([report()])
    rendezvous = Rendezvous(transport="gloo", host="127.0.0.1", port=1, world_size=2, timeout_s=5)
    manifest = Manifest(tensors=(), bucket_bytes=1)
    await learner.send(PushBegin(session="e", version=0, rendezvous=rendezvous, manifest=manifest))
    await learner.receive(PushDone)


async def work_until(done: Callable[[], bool], learner: ScriptedLearner, pause_s: float = 0.0) -> int:
    """Ask for groups one after the other, each within a few seconds; return how many came."""
    num_groups = 0
    while not done():
        await learner.generate(f"g{num_groups}", [1, 2])
        group = await learner.receive(Group, timeout_s=TIMEOUT_S)
        assert group.group_id == f"g{num_groups}"
        await learner.send(Ack(group_ids=[group.group_id]))
        num_groups += 1
        await asyncio.sleep(pause_s)
    return num_groups


Test = Callable[[ScriptedEngine, Serving, ScriptedLearner], Awaitable[None]]


def run_with_server(test: Test, keys: Path | None, timeout_s: float = TIMEOUT_S) -> None:
    """Run a test on a server that already serves a good learner."""

    async def run() -> None:
        engine = ScriptedEngine()
        async with serving(engine, keys=server_keys(str(keys)) if keys else None) as running:
            learner = ScriptedLearner(running.endpoint, keys=learner_keys(str(keys)) if keys else None)
            try:
                async with asyncio.timeout(timeout_s):
                    await push(engine, learner)
                    await test(engine, running, learner)
            finally:
                learner.close()

    asyncio.run(run())


def test_a_listed_key_is_served_end_to_end(keys: Path) -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await learner.generate("g", [5, 6], num_completions=3)
        group = await learner.receive(Group)
        assert [completion.token_ids.tolist() for completion in group.completions] == [[7], [7, 8], [7, 8, 9]]

    run_with_server(test, keys)


def test_a_key_may_come_and_go_while_the_server_runs(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other")
    learner_key = learner_keys(str(keys))
    other = msgspec.structs.replace(learner_keys(str(tmp_path / "other")), server=learner_key.server)

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        newcomer = ScriptedLearner(running.endpoint, learner.run, keys=other)
        (keys / "allowed" / "half-copied.pub").write_bytes(other.public[:20])
        with pytest.raises(DeadlineExceeded):
            await newcomer.channel.send(Ack(group_ids=[]), 0.5)
        newcomer.close()
        (keys / "allowed" / "half-copied.pub").write_bytes(other.public)
        (keys / "allowed" / "learner.pub").unlink()
        await learner.generate("on a connection that was open before", [1])
        await learner.receive(Group)
        newcomer = ScriptedLearner(running.endpoint, learner.run, keys=other)
        newcomer.learner = learner.learner  # the same one, with its new key
        await newcomer.join()
        newcomer.close()
        removed = make_link(running.endpoint, learner_key)
        with pytest.raises(ExceptionGroup) as caught:
            await removed.run()
        assert caught.group_contains(HandshakeRefused, match="does not know this learner's key")
        removed.close()

    run_with_server(test, keys)


async def assert_shut_out(kind: str, running: Serving, learner: ScriptedLearner, *more: str) -> None:
    """The intruders get nothing and cost nothing, and the learner's groups keep coming meanwhile."""
    server = psutil.Process()
    await asyncio.sleep(0.5)
    files_before, memory_before = server.num_fds(), server.memory_info().rss
    intrusion = asyncio.create_task(intrude(kind, running.endpoint, *more))
    num_groups = await work_until(intrusion.done, learner)
    counts = intrusion.result()
    assert counts["answers"] == 0 and counts["ended"] > 0, "or they have not even tried"
    assert num_groups > 10
    assert running.server.status()["run"] == learner.run
    async with asyncio.timeout(10):
        while server.num_fds() > files_before + MAX_MORE_FILES:
            await asyncio.sleep(0.1)
    assert server.memory_info().rss - memory_before < MAX_GROWTH_BYTES


@pytest.mark.parametrize("wrong_keys", ["unknown key", "another server"], indirect=True)
def test_a_key_that_is_not_listed_and_one_for_another_server_get_nothing(keys: Path, wrong_keys: Path) -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await assert_shut_out("keys", running, learner, str(wrong_keys))

    run_with_server(test, keys)


@pytest.mark.parametrize("kind", ["plain", "raw"])
def test_plain_text_and_what_is_no_zeromq_get_nothing(keys: Path, kind: str) -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await assert_shut_out(kind, running, learner)

    run_with_server(test, keys)


def test_the_server_says_who_knocks_in_vain(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await learner.receive(Pulse)
        await intrude("plain", running.endpoint)
        await learner.receive(Pulse)
        await asyncio.sleep(1.5)

    with caplog.at_level(logging.WARNING, "inference_server"):
        run_with_server(test, keys)
    lines = [line for line in caplog.messages if "failed in the handshake" in line]
    # Which side ends a connection first decides what this one can know of it.
    assert len(lines) == 1 and re.search(r": \d+ with (keys on one side only|broken off)", lines[0])


@pytest.mark.parametrize("num_bytes", [10, 1 << 20])
def test_a_stranger_that_floods_is_cut_off_and_the_learner_undisturbed(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A loaded machine reads fewer than the server's own limit in a second, and so would never cut off.
    monkeypatch.setattr("protocol.channel.sockets.MAX_MESSAGES_PER_S", 100)

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        memory_before = psutil.Process().memory_info().rss
        flood = asyncio.create_task(intrude("flood", running.endpoint, str(num_bytes)))
        num_groups = await work_until(flood.done, learner)
        counts = flood.result()
        assert counts["ended"] > 0 and counts["answers"] <= counts["ended"] + 1
        assert num_groups > 10
        # A queue of 100 messages, of the connection that is cut off and perhaps of the one made after it.
        assert psutil.Process().memory_info().rss - memory_before < 4 * MAX_GROWTH_BYTES

    run_with_server(test, None)


def test_a_welcomed_learner_may_send_more_than_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.channel.sockets.MAX_MESSAGES_PER_S", 10)

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        for index in range(200):
            await learner.generate(f"g{index}", [1])
        assert {(await learner.receive(Group)).group_id for _ in range(200)} == {f"g{index}" for index in range(200)}

    run_with_server(test, None)


# --- the learner's side ------------------------------------------------------------------------------------------


def make_link(endpoint: str, keys: LearnerKeys | None, **options: Any) -> ServerLink:
    hello = Hello(run="r", protocol_version=PROTOCOL_VERSION, model=MODEL, learner="l")
    return ServerLink(endpoint, hello, keys=keys, **options)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.05)


def run_link(endpoint_keys: ServerKeys | None, link_keys: LearnerKeys | None) -> None:
    """Run a link to a server until it ends by itself. Raises what ended it."""

    async def run() -> None:
        async with serving(ScriptedEngine(), keys=endpoint_keys) as running:
            link = make_link(running.endpoint, link_keys)
            try:
                await asyncio.wait_for(link.run(), TIMEOUT_S)
            finally:
                link.close()

    asyncio.run(run())


@pytest.mark.parametrize("wrong_keys", ["unknown key"], indirect=True)
def test_a_learner_whose_key_is_not_listed_is_reported_at_once(keys: Path, wrong_keys: Path) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run_link(server_keys(str(keys)), learner_keys(str(wrong_keys)))
    assert caught.group_contains(HandshakeRefused, match="does not know this learner's key; copy its public key")


@pytest.mark.parametrize("locked", ["server", "learner"])
def test_keys_on_one_side_only_are_an_error_that_says_which_side(keys: Path, locked: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        if locked == "server":
            run_link(server_keys(str(keys)), None)
        else:
            run_link(None, learner_keys(str(keys)))
    said = {"server": "requires keys", "learner": "has no keys, but this learner has"}[locked]
    assert caught.group_contains(HandshakeRefused, match=f"{said}; set the same `keys` on both sides")


@pytest.mark.parametrize("wrong_keys", ["another server"], indirect=True)
def test_a_server_that_is_not_the_one_of_the_key_is_named_as_the_likely_cause(
    keys: Path, wrong_keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with serving(ScriptedEngine(), keys=server_keys(str(keys))) as running:
            link = make_link(running.endpoint, learner_keys(str(wrong_keys)))
            task = asyncio.create_task(link.run())
            await until(lambda: link.handshakes_fail)
            await asyncio.sleep(1.5)
            assert not link.connected and link.handshakes_fail
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            link.close()

    asyncio.run(run())
    lines = [line for line in caplog.messages if "replace `server.pub` in `keys`" in line]
    assert len(lines) == 1


def test_a_server_that_comes_back_with_its_keys_is_found_again(keys: Path) -> None:
    async def run() -> None:
        async with serving(ScriptedEngine(), keys=server_keys(str(keys))) as first:
            endpoint = first.endpoint
            link = make_link(endpoint, learner_keys(str(keys)))
            task = asyncio.create_task(link.run())
            await until(lambda: link.connected)
        await until(lambda: not link.connected)
        async with serving(ScriptedEngine(), endpoint=endpoint, keys=server_keys(str(keys))):
            await until(lambda: link.connected)
            assert not link.handshakes_fail
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        link.close()

    asyncio.run(run())


def test_neither_side_opens_an_address_beyond_loopback_without_keys(keys: Path) -> None:
    from protocol.channel.sockets import LearnerChannel, ServerChannel

    for channel in (ServerChannel, LearnerChannel):
        with pytest.raises(ConfigError, match="is open to other machines"):
            channel("tcp://0.0.0.0:5757")

    async def open_with_keys() -> None:
        server = ServerChannel("tcp://0.0.0.0:*", server_keys(str(keys)))
        port = server.endpoint.rpartition(":")[2]
        learner = LearnerChannel(f"tcp://127.0.0.1:{port}", learner_keys(str(keys)))
        await learner.send(Ack(group_ids=["x"]), TIMEOUT_S)
        _, message = await asyncio.wait_for(server.receive(), TIMEOUT_S)
        assert isinstance(message, Ack)
        learner.close()
        server.close()

    asyncio.run(open_with_keys())


def test_what_travels_is_not_readable_on_the_way(keys: Path) -> None:
    """Read a connection between the two as a man in the middle does."""

    async def run() -> bytes:
        seen = bytearray()
        async with serving(ScriptedEngine(), keys=server_keys(str(keys))) as running:
            host, port = running.endpoint.removeprefix("tcp://").split(":")

            async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while data := await reader.read(65536):
                    seen.extend(data)
                    writer.write(data)
                writer.close()

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                to_server = await asyncio.open_connection(host, int(port))
                await asyncio.gather(copy(reader, to_server[1]), copy(to_server[0], writer))

            middle = await asyncio.start_server(relay, "127.0.0.1", 0)
            endpoint = f"tcp://127.0.0.1:{middle.sockets[0].getsockname()[1]}"
            learner = ScriptedLearner(endpoint, run="a-secret-run", keys=learner_keys(str(keys)))
            assert (await learner.join()).dtype == "float32"
            learner.close()
            await asyncio.sleep(0.2)
            middle.close()
        return bytes(seen)

    seen = asyncio.run(run())
    assert b"CURVE" in seen and len(seen) > 500
    assert b"a-secret-run" not in seen and b"float32" not in seen


def test_keys_are_replaced_by_new_ones_and_the_old_learner_is_out(tmp_path: Path, keys: Path) -> None:
    learner = learner_keys(str(keys))
    public, secret = zmq.curve_keypair()
    (keys / "allowed" / "learner.pub").write_bytes(public)
    with pytest.raises(ExceptionGroup) as caught:
        run_link(server_keys(str(keys)), learner)
    assert caught.group_contains(HandshakeRefused)

    async def connect() -> None:
        async with serving(ScriptedEngine(), keys=server_keys(str(keys))) as running:
            other = ScriptedLearner(
                running.endpoint, keys=msgspec.structs.replace(learner, secret=secret, public=public)
            )
            await other.join()
            other.close()

    asyncio.run(connect())
