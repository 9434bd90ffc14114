"""Endless messages and silent peers, in hand-written ZMTP, because ZeroMQ itself sends neither."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from protocol.channel.sockets import LearnerChannel, ServerChannel
from protocol.codec import encode
from protocol.endpoint import split_endpoint
from protocol.messages import Ack, Refused
from tests.event_loop import in_event_loop
from tests.link import Link

MIB = 1 << 20
TIMEOUT_S = 30.0
LIMIT_BYTES = 16 * MIB
MOST_BYTES = 1024 * MIB
"""Memory without the limit."""
LONG_BYTES = 400_000
"""More than the buffers of the proxy and the kernel on a slow link."""


def greet(endpoint: str) -> socket.socket:
    """Connect as a DEALER without a mechanism, before the first message."""
    host, port = split_endpoint(endpoint)
    connection = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    receive_exactly(connection, 64)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    connection.sendall(bytes([4, len(ready)]) + ready)
    _, length = receive_exactly(connection, 2)
    receive_exactly(connection, length)
    return connection


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Receive exactly `num_bytes`. MSG_WAITALL has no effect on a socket with a timeout."""
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        assert part, "the connection has ended"
        received += part
    return received


def frame(body: bytes, *, more: bool = False) -> bytes:
    return bytes([2 + more]) + struct.pack(">Q", len(body)) + body


@contextmanager
def linked(**options: float) -> Iterator[tuple[ServerChannel, LearnerChannel, Link]]:
    """Yield both ends with a link between them, for use in an event loop."""
    with (
        closing(ServerChannel("tcp://127.0.0.1:*")) as server,
        closing(Link(int(split_endpoint(server.endpoint)[1]), **options)) as link,
        closing(LearnerChannel(f"tcp://127.0.0.1:{link.port}")) as learner,
    ):
        yield server, learner, link


async def name_of_peer(server: ServerChannel, learner: LearnerChannel) -> bytes:
    """Send a message and return the server's id of the learner on this connection."""
    await learner.send(Ack(group_ids=[]), TIMEOUT_S)
    return (await server.receive())[0]


def set_limits(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(f"protocol.channel.sockets.{name}", value)


@pytest.mark.parametrize("is_admitted", [False, True])
@in_event_loop
async def test_an_endless_message_closes_the_connection_of_its_sender(
    monkeypatch: pytest.MonkeyPatch, is_admitted: bool
) -> None:
    set_limits(
        monkeypatch,
        MAX_UNFINISHED_BYTES=LIMIT_BYTES if is_admitted else MOST_BYTES,
        MAX_STRANGER_UNFINISHED_BYTES=MIB if is_admitted else LIMIT_BYTES,
    )
    with (
        closing(ServerChannel("tcp://127.0.0.1:*")) as server,
        closing(LearnerChannel(server.endpoint)) as learner,
        greet(server.endpoint) as connection,
    ):
        connection.sendall(frame(b"".join(encode(Ack(group_ids=[])))))
        sender, _ = await server.receive()
        server.admit(sender if is_admitted else None)
        num_bytes = 0

        def send_without_end() -> None:
            nonlocal num_bytes
            with contextlib.suppress(OSError):
                while num_bytes < MOST_BYTES:
                    connection.sendall(frame(bytes(MIB), more=True))
                    num_bytes += MIB

        sending = asyncio.create_task(asyncio.to_thread(send_without_end))
        while not sending.done():
            await name_of_peer(server, learner)
            await asyncio.sleep(0.01)
            server.poll_connections()
        assert LIMIT_BYTES < num_bytes < MOST_BYTES


@in_event_loop
async def test_a_message_of_countless_empty_frames_closes_the_connection_of_its_sender() -> None:
    with closing(ServerChannel("tcp://127.0.0.1:*")) as server, closing(LearnerChannel(server.endpoint)) as learner:
        with greet(server.endpoint) as connection:
            connection.sendall(b"\1\0" * 100_000 + b"\0\0")
            receiving = asyncio.create_task(server.receive())
            with contextlib.suppress(ConnectionResetError):
                while await asyncio.to_thread(connection.recv, 4096):
                    pass
        await learner.send(Ack(group_ids=["mine"]), TIMEOUT_S)
        _, message = await receiving
        assert isinstance(message, Ack) and message.group_ids == ["mine"]
        assert server.num_shut_out == 1


@pytest.mark.parametrize(
    ("listens_at", "silent_from"),
    [("127.0.0.1", "127.0.0.1"), ("*", "127.0.0.1"), ("[::1]", "[::1]"), ("[::]", "127.0.0.1")],
)
@in_event_loop
async def test_a_silent_peer_is_disconnected_and_a_pinging_peer_is_not(
    monkeypatch: pytest.MonkeyPatch, listens_at: str, silent_from: str
) -> None:
    set_limits(monkeypatch, DEAD_PEER_TIMEOUT_MS=1000, HEARTBEAT_INTERVAL_MS=50)
    with closing(ServerChannel(f"tcp://{listens_at}:*", insecure=True)) as server:
        endpoint = f"tcp://{silent_from}:{split_endpoint(server.endpoint)[1]}"
        with closing(LearnerChannel(endpoint)) as learner, greet(endpoint) as silent:
            pinging_peer = await name_of_peer(server, learner)
            silent.sendall(frame(b"".join(encode(Ack(group_ids=[])))))
            silent_peer, _ = await server.receive()
            while await server.send(silent_peer, Refused(reason="")):
                server.poll_connections()
                await asyncio.sleep(0.05)
            assert await server.send(pinging_peer, Refused(reason=""))
            assert isinstance(await learner.receive(), Refused)


@pytest.mark.parametrize("slow", ["bytes_per_s", "bytes_per_s_to_server"])
@in_event_loop
async def test_a_long_frame_arrives_over_a_slow_link(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """Groups and manifests are long messages: pings and pongs must wait, but their bytes are signs of life."""
    set_limits(monkeypatch, DEAD_PEER_TIMEOUT_MS=1000, HEARTBEAT_INTERVAL_MS=50)
    with linked(**{slow: LONG_BYTES / 3}) as (server, learner, _):  # 3 s
        peer = await name_of_peer(server, learner)
        parts_seen = 0

        async def look() -> None:
            nonlocal parts_seen
            while True:
                server.poll_connections()
                parts_seen += learner.poll_connection()
                if slow == "bytes_per_s_to_server":
                    await server.send(peer, Refused(reason=""))  # replaces pulses
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


@in_event_loop
async def test_a_silent_server_is_disconnected_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, DEAD_PEER_TIMEOUT_MS=500, HEARTBEAT_INTERVAL_MS=50)
    with linked() as (server, learner, link):
        first = await name_of_peer(server, learner)
        link.stall()
        while learner.num_broken == 0:
            learner.poll_connection()
            learner.check_handshake()
            await asyncio.sleep(0.05)
        link.restore()
        assert await name_of_peer(server, learner) != first


@in_event_loop
async def test_servers_on_one_port_of_two_addresses_do_not_keep_each_other_alive() -> None:
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


@in_event_loop
async def test_a_late_check_disconnects_no_peer_that_was_stopped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a suspend of the whole machine, the peer has had no time to ping."""
    set_limits(monkeypatch, DEAD_PEER_TIMEOUT_MS=300)
    with closing(ServerChannel("tcp://127.0.0.1:*")) as server, greet(server.endpoint) as connection:
        connection.setblocking(False)
        server.poll_connections()
        await asyncio.sleep(0.5)
        server.poll_connections()
        with pytest.raises(BlockingIOError):
            connection.recv(1)
        server.poll_connections()
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""


@in_event_loop
async def test_consecutive_long_messages_are_not_an_endless_message(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, MAX_STRANGER_UNFINISHED_BYTES=3 * MIB, MAX_BYTES_PER_S=1 << 40)
    with closing(ServerChannel("tcp://127.0.0.1:*")) as server, closing(LearnerChannel(server.endpoint)) as learner:
        for _ in range(20):
            await learner.send(Ack(group_ids=["x" * MIB]), TIMEOUT_S)
            server.poll_connections()
            _, message = await server.receive()
            assert isinstance(message, Ack)
            server.poll_connections()
