"""Access to the server with listed keys over real sockets, while processes without keys connect, send and flood."""

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from learner.servers.link import ServerLink
from protocol.channel.keys import LearnerKeys, learner_keys, make_keys, server_keys
from protocol.endpoint import split_endpoint
from protocol.errors import DeadlineExceeded, HandshakeRefused
from protocol.messages import PROTOCOL_VERSION, Ack, Group, Hello
from tests.fakes import ScriptedEngine, serving
from tests.fingerprint import MODEL
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.scripted_server import TIMEOUT_S, Stage, until, with_server
from tests.link import Link
from tests.malformed import DOCTOR_MESSAGES, TO_SERVER, malformed_messages

ROOT = Path(__file__).parent.parent.parent
INTRUSION_S = 2.0
MAX_GROWTH_BYTES = 64 << 20
"""The intruders try to use many times as much of the server's memory."""
MAX_MORE_FILES = 10
"""The intruders try to open 50 at a time; asyncio opens a few to start them."""


async def intrude(kind: str, endpoint: str, *more: str) -> dict[str, int]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.protocol.intruder", kind, endpoint, str(INTRUSION_S), *more,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    return json.loads(output)


async def work_until(done: Callable[[], bool], learner: ScriptedLearner) -> int:
    """Request groups in sequence, each with a deadline. Return their number."""
    num_groups = 0
    while not done():
        assert (await learner.group(f"g{num_groups}", [1, 2])).group_id == f"g{num_groups}"
        await learner.send(Ack(group_ids=[f"g{num_groups}"]))
        num_groups += 1
        await asyncio.sleep(0)
    return num_groups


async def assert_shut_out(at: Stage, *intruders: tuple[str, ...]) -> None:
    """Check that intruders get no answer and cost no resources, while the learner gets its groups."""
    server = psutil.Process()
    files_before, memory_before = server.num_fds(), server.memory_info().rss
    intrusion = asyncio.gather(*(intrude(kind, at.running.endpoint, *more) for kind, *more in intruders))
    num_groups = await work_until(intrusion.done, at.learner)
    for counts in intrusion.result():
        assert counts["answers"] == 0 and counts["ended"] > 0, "the intruder has not even tried"
    assert num_groups > 3
    assert at.status()["run"] == at.learner.run
    async with asyncio.timeout(TIMEOUT_S):
        while server.num_fds() > files_before + MAX_MORE_FILES:
            await asyncio.sleep(0.1)
    assert server.memory_info().rss - memory_before < MAX_GROWTH_BYTES


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def with_wrong(keys: Path, right: str) -> str:
    """Return keys of another pair except for the file `right`: of an unlisted learner, or for another server."""
    wrong = keys.with_name(f"wrong but for {right}")
    make_keys(wrong)
    (wrong / right).write_bytes((keys / right).read_bytes())
    return str(wrong)


@with_server()
async def test_a_key_can_be_added_and_removed_while_the_server_runs(at: Stage, keys: Path, tmp_path: Path) -> None:
    make_keys(tmp_path / "other")
    other = msgspec.structs.replace(learner_keys(str(tmp_path / "other")), server=learner_keys(str(keys)).server)
    await at.join_and_push()
    newcomer = at.another(at.learner.run, keys=other)
    (keys / "allowed" / "half-copied.pub").write_bytes(other.public[:20])
    with pytest.raises(DeadlineExceeded):
        await newcomer.channel.send(Ack(group_ids=[]), 0.5)
    newcomer.close()
    (keys / "allowed" / "half-copied.pub").write_bytes(other.public)
    (keys / "allowed" / "learner.pub").unlink()
    await at.learner.group("on a connection that was open before", [1])
    newcomer = at.another(at.learner.run, keys=other)
    newcomer.learner = at.learner.learner  # the same learner with its new key
    await newcomer.join()
    newcomer.close()
    removed = make_link(at.running.endpoint, learner_keys(str(keys)))
    with pytest.raises(ExceptionGroup) as caught:
        await removed.run()
    assert caught.group_contains(HandshakeRefused, match="does not know this learner's key")
    removed.close()


@with_server()
async def test_a_peer_without_a_listed_key_gets_no_answer_and_is_counted(
    at: Stage, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "inference_server")
    unknown_key, another_server = with_wrong(keys, "server.pub"), with_wrong(keys, "learner.key")
    await at.join_and_push()
    await assert_shut_out(at, ("keys", unknown_key), ("keys", another_server), ("plain",), ("raw",))
    await until(lambda: at.status()["handshakes_failed"] > 0 and "failed in the handshake" in caplog.text)
    (line,) = (line for line in caplog.messages if "failed in the handshake" in line)
    # The reported reason depends on which side closes the connection first.
    assert re.search(r": \d+ with \w+", line)


@with_server()
async def test_a_flooding_peer_is_disconnected_without_affecting_the_learner(
    at: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A loaded machine reads fewer messages per second than the server's limit, and would never cut a peer off.
    monkeypatch.setattr("protocol.channel.sockets.MAX_MESSAGES_PER_S", 100)
    await at.join_and_push()
    memory_before = psutil.Process().memory_info().rss
    flood = asyncio.create_task(intrude("flood", at.running.endpoint, str(1 << 20)))
    num_groups = await work_until(flood.done, at.learner)
    counts = flood.result()
    assert counts["ended"] > 0 and counts["answers"] <= counts["ended"] + 1
    assert num_groups > 3
    # A queue of 100 messages of the closed connection, and possibly one of the next.
    assert psutil.Process().memory_info().rss - memory_before < 4 * MAX_GROWTH_BYTES


@with_server()
async def test_a_welcomed_learner_can_send_more_than_other_peers_until_its_run_ends(
    at: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protocol.channel.sockets.MAX_MESSAGES_PER_S", 10)
    await at.join_and_push()
    for index in range(200):
        await at.learner.generate(f"g{index}", [1])
    assert {(await at.learner.receive(Group)).group_id for _ in range(200)} == {f"g{index}" for index in range(200)}
    await at.learner.leave()
    for _ in range(100):
        await at.learner.send(Ack(group_ids=[]))
    await until(lambda: at.running.server._channel.num_shut_out > 0)


@with_server()
async def test_a_welcomed_learner_that_sends_garbage_does_not_end_the_server(at: Stage) -> None:
    await at.join_and_push()
    messages = malformed_messages([*TO_SERVER[1:], *DOCTOR_MESSAGES], seed=1)
    for _ in range(100):
        mad = at.another(run=at.learner.run)
        mad.learner = at.learner.learner  # need not wait until the previous learner is missed
        await mad.join()
        for _ in range(5):
            await mad.channel._messages.send(next(messages))
        mad.close()
    assert not at.running.task.done()
    assert (await at.learner.join()).server_id


# --- the learner's side ------------------------------------------------------------------------------------------


def make_link(endpoint: str, keys: LearnerKeys | None, **options: Any) -> ServerLink:
    hello = Hello(run="r", protocol_version=PROTOCOL_VERSION, model=MODEL, learner="l")
    return ServerLink(endpoint, hello, keys=keys, **options)


@pytest.mark.parametrize(
    ("server_has", "learner_has", "message"),
    [
        ("keys", "another key", "does not know this learner's key; copy its public key"),
        ("keys", "none", "requires keys; set the same `keys` on both sides"),
        ("none", "keys", "has no keys, but this learner has; set the same `keys` on both sides"),
    ],
)
def test_wrong_keys_end_the_link_immediately_with_a_remedy(
    keys: Path, server_has: str, learner_has: str, message: str
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
    assert caught.group_contains(HandshakeRefused, match=message)


def test_a_server_with_another_key_is_reported_as_the_likely_cause(
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


def test_a_server_that_restarts_with_its_keys_is_found_again(keys: Path) -> None:
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


@with_server()
async def test_messages_are_encrypted(at: Stage, keys: Path) -> None:
    with closing(Link(int(split_endpoint(at.running.endpoint)[1]))) as middle:
        learner = ScriptedLearner(f"tcp://127.0.0.1:{middle.port}", "a-secret-run", keys=learner_keys(str(keys)))
        assert (await learner.join()).dtype == "float32"
        learner.close()
        seen = bytes(middle.seen)
    assert b"CURVE" in seen and len(seen) > 500
    assert b"a-secret-run" not in seen and b"float32" not in seen
