"""Messages that do not end and peers that fall silent: they speak ZMTP by hand, for ZeroMQ itself does neither."""

import asyncio
import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing

import pytest

from protocol.channel.sockets import LearnerChannel, ServerChannel
from protocol.codec import encode
from protocol.endpoint import split_endpoint
from protocol.messages import Ack, Refused
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.link import Link

MIB = 1 << 20
TIMEOUT_S = 30.0
LIMIT_BYTES = 16 * MIB
MOST_BYTES = 1024 * MIB
"""What it would come to otherwise."""
LONG_BYTES = 400_000
"""More than the proxy and the kernel keep from one end of a slow link to the other."""


def greet(endpoint: str) -> socket.socket:
    """Connect as a DEALER without a mechanism, up to the first message."""
    host, port = split_endpoint(endpoint)
    connection = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    connection.recv(64, socket.MSG_WAITALL)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    connection.sendall(bytes([4, len(ready)]) + ready)
    _, length = connection.recv(2, socket.MSG_WAITALL)
    connection.recv(length, socket.MSG_WAITALL)
    return connection


def frame(body: bytes, *, more: bool = False) -> bytes:
    return bytes([2 + more]) + struct.pack(">Q", len(body)) + body


class EndlessMessage(threading.Thread):
    """Sends one frame after the other until the connection is ended."""

    num_bytes = 0

    def __init__(self, endpoint: str) -> None:
        super().__init__(daemon=True)
        self._endpoint = endpoint

    def run(self) -> None:
        part = frame(bytes(MIB), more=True)
        with greet(self._endpoint) as connection, contextlib.suppress(OSError):
            while self.num_bytes < MOST_BYTES:
                connection.sendall(part)
                self.num_bytes += len(part)


def over_a_link(test: Callable[[ServerChannel, LearnerChannel, Link], Awaitable[None]], **options: float) -> None:
    async def run() -> None:
        with (
            closing(ServerChannel("tcp://127.0.0.1:*")) as server,
            closing(Link(int(server.endpoint.rpartition(":")[2]), **options)) as link,
            closing(LearnerChannel(f"tcp://127.0.0.1:{link.port}")) as learner,
        ):
            await asyncio.wait_for(test(server, learner, link), TIMEOUT_S)

    asyncio.run(run())


async def name_of_peer(server: ServerChannel, learner: LearnerChannel) -> bytes:
    """Say something and return by which name the server knows the learner on this connection."""
    await learner.send(Ack(group_ids=[]), TIMEOUT_S)
    return (await server.receive())[0]


def test_a_message_that_does_not_end_costs_its_sender_the_connection_and_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("protocol.channel.sockets.MAX_UNFINISHED_BYTES", LIMIT_BYTES)

    async def run() -> None:
        server = ServerChannel("tcp://127.0.0.1:*")
        learner = ScriptedLearner(server.endpoint)
        endless = EndlessMessage(server.endpoint)
        endless.start()
        async with asyncio.timeout(TIMEOUT_S):
            while endless.is_alive():
                await learner.send(Ack(group_ids=["g"]))
                _, message = await server.receive()
                assert isinstance(message, Ack)
                await asyncio.sleep(0.01)
                server.poll_connections()
        assert LIMIT_BYTES < endless.num_bytes < MOST_BYTES
        learner.close()
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("listens_at", "silent_from"),
    [
        ("tcp://127.0.0.1:*", "127.0.0.1"),
        ("tcp://*:*", "127.0.0.1"),
        ("tcp://[::1]:*", "[::1]"),
        ("tcp://[::]:*", "[::1]"),
        ("tcp://[::]:*", "127.0.0.1"),
    ],
)
def test_a_peer_that_falls_silent_after_a_message_is_cut_off_and_one_that_pings_is_not(
    monkeypatch: pytest.MonkeyPatch, listens_at: str, silent_from: str
) -> None:
    monkeypatch.setattr("protocol.channel.sockets.DEAD_PEER_TIMEOUT_MS", 1000)
    monkeypatch.setattr("protocol.channel.sockets.HEARTBEAT_INTERVAL_MS", 50)

    async def run() -> None:
        server = ServerChannel(listens_at, insecure=True)
        endpoint = f"tcp://{silent_from}:{split_endpoint(server.endpoint)[1]}"
        learner = ScriptedLearner(endpoint)
        silent = greet(endpoint)
        message = b"".join(bytes(part) for part in encode(Ack(group_ids=[])))
        silent.sendall(frame(message))
        async with asyncio.timeout(TIMEOUT_S):
            await learner.send(Ack(group_ids=[]))
            peers = [(await server.receive())[0] for _ in range(2)]
            give_up_at = time.monotonic() + 2
            while time.monotonic() < give_up_at:
                server.poll_connections()
                await asyncio.sleep(0.05)
            assert sorted([bool(await server.send(peer, Refused(reason=""))) for peer in peers]) == [False, True]
            assert isinstance(await learner.receive(Refused), Refused)
        silent.close()
        learner.close()
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize("slow", ["bytes_per_s", "bytes_per_s_to_server"])
def test_a_frame_that_takes_longer_than_a_dead_peer_comes_through_a_slow_link(
    monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """Such are a group, and the manifest of a push: no ping or pong passes it, but its bytes are signs of life."""
    monkeypatch.setattr("protocol.channel.sockets.DEAD_PEER_TIMEOUT_MS", 500)
    monkeypatch.setattr("protocol.channel.sockets.HEARTBEAT_INTERVAL_MS", 50)

    async def test(server: ServerChannel, learner: LearnerChannel, _: Link) -> None:
        peer = await name_of_peer(server, learner)
        parts_seen = 0

        async def look() -> None:
            nonlocal parts_seen
            while True:
                server.poll_connections()
                parts_seen += learner.poll_connection()
                if slow == "bytes_per_s_to_server":
                    await server.send(peer, Refused(reason=""))  # in place of pulses
                await asyncio.sleep(0.1)

        looking = asyncio.create_task(look())
        if slow == "bytes_per_s":
            assert await server.send(peer, Refused(reason="x" * LONG_BYTES))
            await learner.receive()
            assert parts_seen > 5
        else:
            await learner.send(Ack(group_ids=["x" * LONG_BYTES]), TIMEOUT_S)
            await server.receive()
        looking.cancel()
        learner.check_handshake()
        assert learner.num_broken == 0

    over_a_link(test, **{slow: LONG_BYTES / 2})  # 2 s


def test_a_server_that_falls_silent_is_cut_off_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.channel.sockets.DEAD_PEER_TIMEOUT_MS", 500)
    monkeypatch.setattr("protocol.channel.sockets.HEARTBEAT_INTERVAL_MS", 50)

    async def test(server: ServerChannel, learner: LearnerChannel, link: Link) -> None:
        first = await name_of_peer(server, learner)
        link.stall()
        while learner.num_broken == 0:
            learner.poll_connection()
            learner.check_handshake()
            await asyncio.sleep(0.05)
        link.restore()
        assert await name_of_peer(server, learner) != first

    over_a_link(test)


def test_servers_on_one_port_of_two_addresses_do_not_keep_each_other_alive() -> None:
    async def run() -> None:
        with closing(ServerChannel("tcp://127.0.0.1:*")) as silent:
            port = split_endpoint(silent.endpoint)[1]
            with (
                closing(ServerChannel(f"tcp://127.0.0.2:{port}", insecure=True)) as talking,
                closing(LearnerChannel(silent.endpoint)) as of_silent,
                closing(LearnerChannel(talking.endpoint, insecure=True)) as of_talking,
            ):
                await name_of_peer(silent, of_silent)
                peer = await name_of_peer(talking, of_talking)
                of_silent.poll_connection()
                of_talking.poll_connection()
                for _ in range(5):
                    assert await talking.send(peer, Refused(reason="x" * LONG_BYTES))
                    await of_talking.receive()
                    assert of_talking.poll_connection()
                    assert not of_silent.poll_connection()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_look_after_a_long_time_cuts_nobody_off_who_was_stopped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the whole machine stood still: its peer has had no time to ping since."""
    monkeypatch.setattr("protocol.channel.sockets.DEAD_PEER_TIMEOUT_MS", 300)

    async def run() -> None:
        server = ServerChannel("tcp://127.0.0.1:*")
        with greet(server.endpoint) as connection:
            connection.setblocking(False)
            server.poll_connections()
            await asyncio.sleep(0.5)
            server.poll_connections()
            with pytest.raises(BlockingIOError):
                connection.recv(1)
            server.poll_connections()
            assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
        server.close()

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_one_long_message_after_the_other_is_no_endless_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.channel.sockets.MAX_UNFINISHED_BYTES", 3 * MIB)

    async def run() -> None:
        monkeypatch.setattr("protocol.channel.sockets.MAX_BYTES_PER_S", 1 << 40)
        server = ServerChannel("tcp://127.0.0.1:*")
        learner = ScriptedLearner(server.endpoint)
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(20):
                await learner.send(Ack(group_ids=["x" * MIB]))
                server.poll_connections()
                _, message = await server.receive()
                assert isinstance(message, Ack)
                server.poll_connections()
        learner.close()
        server.close()

    asyncio.run(run())


def calls_of(look: Callable[[], object]) -> int:
    """How many functions of C a look calls, system calls among them."""
    num_calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal num_calls
        num_calls += event == "c_call"

    sys.setprofile(count)
    try:
        look()
    finally:
        sys.setprofile(None)
    return num_calls


def test_a_look_at_one_link_costs_the_same_however_many_others_there_are() -> None:
    async def run() -> None:
        with closing(ServerChannel("tcp://127.0.0.1:*")) as server, ExitStack() as links:
            calls = {}
            learners: list[LearnerChannel] = []
            for num_links in (8, 128):
                while len(learners) < num_links:
                    learners.append(links.enter_context(closing(LearnerChannel(server.endpoint))))
                    await name_of_peer(server, learners[-1])
                learners[0].poll_connection()  # reads what has happened until now
                calls[num_links] = calls_of(learners[0].poll_connection)
            assert 0 < calls[128] <= calls[8]

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))


def test_a_servers_look_costs_the_same_whatever_else_its_process_has_open() -> None:
    async def run() -> None:
        with (
            closing(ServerChannel("tcp://127.0.0.1:*")) as server,
            closing(LearnerChannel(server.endpoint)) as learner,
            ExitStack() as others,
        ):
            await name_of_peer(server, learner)
            server.poll_connections()
            alone = calls_of(server.poll_connections)
            for _ in range(100):
                for one in socket.socketpair():
                    others.enter_context(one)
            assert 0 < calls_of(server.poll_connections) <= alone

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_S))
