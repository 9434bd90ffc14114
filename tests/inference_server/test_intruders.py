"""Who may talk to the server: listed keys, over real sockets, while processes without one knock, shout and flood."""

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from learner.servers.link import ServerLink
from protocol.channel.keys import LearnerKeys, learner_keys, make_keys, server_keys
from protocol.errors import DeadlineExceeded, HandshakeRefused
from protocol.messages import PROTOCOL_VERSION, Ack, Group, Hello
from tests.fakes import ScriptedEngine, Serving, serving
from tests.fingerprint import MODEL
from tests.inference_server.intrusion import MAX_GROWTH_BYTES, assert_shut_out, intrude, work_until
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.scripted_server import TIMEOUT_S, join_and_push, run_with_server, until


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def with_wrong(keys: Path, right: str) -> str:
    """Keys of another pair, but for one file: of a learner that is not listed, or for another server."""
    wrong = keys.with_name(f"wrong but for {right}")
    make_keys(wrong)
    (wrong / right).write_bytes((keys / right).read_bytes())
    return str(wrong)


def test_a_key_may_come_and_go_while_the_server_runs(keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other")
    learner_key = learner_keys(str(keys))
    other = msgspec.structs.replace(learner_keys(str(tmp_path / "other")), server=learner_key.server)

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
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

    run_with_server(test, keys=keys)


def test_whoever_has_no_listed_key_gets_nothing_costs_nothing_and_is_counted(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unknown_key, another_server = with_wrong(keys, "server.pub"), with_wrong(keys, "learner.key")

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        intruders: list[tuple[str, ...]] = [("keys", unknown_key), ("keys", another_server), ("plain",), ("raw",)]
        await assert_shut_out(running, learner, *intruders)
        await until(lambda: running.server.status()["handshakes_failed"] > 0)

    with caplog.at_level(logging.WARNING, "inference_server"):
        run_with_server(test, keys=keys)
    lines = [line for line in caplog.messages if "failed in the handshake" in line]
    # Which side ends a connection first decides what this one can know of it.
    assert len(lines) == 1 and re.search(r": \d+ with \w+", lines[0])


def test_a_stranger_that_floods_is_cut_off_and_the_learner_undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    # A loaded machine reads fewer than the server's own limit in a second, and so would never cut off.
    monkeypatch.setattr("protocol.channel.sockets.MAX_MESSAGES_PER_S", 100)

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        memory_before = psutil.Process().memory_info().rss
        flood = asyncio.create_task(intrude("flood", running.endpoint, str(1 << 20)))
        num_groups = await work_until(flood.done, learner)
        counts = flood.result()
        assert counts["ended"] > 0 and counts["answers"] <= counts["ended"] + 1
        assert num_groups > 3
        # A queue of 100 messages, of the connection that is cut off and perhaps of the one made after it.
        assert psutil.Process().memory_info().rss - memory_before < 4 * MAX_GROWTH_BYTES

    run_with_server(test)


def test_a_welcomed_learner_may_send_more_than_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.channel.sockets.MAX_MESSAGES_PER_S", 10)

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        for index in range(200):
            await learner.generate(f"g{index}", [1])
        assert {(await learner.receive(Group)).group_id for _ in range(200)} == {f"g{index}" for index in range(200)}

    run_with_server(test)


# --- the learner's side ------------------------------------------------------------------------------------------


def make_link(endpoint: str, keys: LearnerKeys | None, **options: Any) -> ServerLink:
    hello = Hello(run="r", protocol_version=PROTOCOL_VERSION, model=MODEL, learner="l")
    return ServerLink(endpoint, hello, keys=keys, **options)


@pytest.mark.parametrize(
    ("server_has", "learner_has", "said"),
    [
        ("keys", "another key", "does not know this learner's key; copy its public key"),
        ("keys", "none", "requires keys; set the same `keys` on both sides"),
        ("none", "keys", "has no keys, but this learner has; set the same `keys` on both sides"),
    ],
)
def test_keys_that_do_not_fit_end_the_link_at_once_with_what_to_do(
    keys: Path, server_has: str, learner_has: str, said: str
) -> None:
    of_learner = {
        "keys": learner_keys(str(keys)), "another key": learner_keys(with_wrong(keys, "server.pub")), "none": None,
    }  # fmt: skip

    async def run() -> None:
        of_server = server_keys(str(keys)) if server_has == "keys" else None
        async with serving(ScriptedEngine(), keys=of_server) as running:
            link = make_link(running.endpoint, of_learner[learner_has])
            try:
                await asyncio.wait_for(link.run(), TIMEOUT_S)
            finally:
                link.close()

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert caught.group_contains(HandshakeRefused, match=said)


def test_a_server_that_is_not_the_one_of_the_key_is_named_as_the_likely_cause(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        return [line for line in caplog.messages if "replace `server.pub` in `keys`" in line]

    async def run() -> None:
        async with serving(ScriptedEngine(), keys=server_keys(str(keys))) as running:
            link = make_link(running.endpoint, learner_keys(with_wrong(keys, "learner.key")))
            task = asyncio.create_task(link.run())
            await until(lambda: link.handshakes_fail and bool(lines()))
            await asyncio.sleep(1.0)  # more handshakes
            assert not link.connected and len(lines()) == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            link.close()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


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

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


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
