"""Messages that do not end and peers that fall silent: they speak ZMTP by hand, for ZeroMQ itself does neither."""

import asyncio
import contextlib
import socket
import struct
import threading
import time

import pytest

from protocol import connections
from protocol.channel import ServerChannel
from protocol.codec import encode
from protocol.messages import Ack, Refused
from tests.inference_server.scripted_learner import ScriptedLearner

MIB = 1 << 20
TIMEOUT_S = 30.0
LIMIT_BYTES = 16 * MIB
MOST_BYTES = 1024 * MIB
"""What it would come to otherwise."""


def greet(endpoint: str) -> socket.socket:
    """Connect as a DEALER without a mechanism, up to the first message."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
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


def test_a_message_that_does_not_end_costs_its_sender_the_connection_and_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MAX_UNFINISHED_BYTES", LIMIT_BYTES)

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
                server.look_at_connections()
        assert LIMIT_BYTES < endless.num_bytes < MOST_BYTES
        learner.close()
        server.close()

    asyncio.run(run())


def test_a_peer_that_falls_silent_after_a_message_is_cut_off_and_one_that_pings_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("protocol.channel.DEAD_PEER_TIMEOUT_MS", 1000)
    monkeypatch.setattr("protocol.channel.HEARTBEAT_INTERVAL_MS", 50)

    async def run() -> None:
        server = ServerChannel("tcp://127.0.0.1:*")
        learner = ScriptedLearner(server.endpoint)
        silent = greet(server.endpoint)
        message = b"".join(bytes(part) for part in encode(Ack(group_ids=[])))
        silent.sendall(frame(message))
        async with asyncio.timeout(TIMEOUT_S):
            await learner.send(Ack(group_ids=[]))
            peers = [(await server.receive())[0] for _ in range(2)]
            give_up_at = time.monotonic() + 2
            while time.monotonic() < give_up_at:
                server.look_at_connections()
                await asyncio.sleep(0.05)
            assert sorted([await server.send(peer, Refused(reason="")) for peer in peers]) == [False, True]
            assert isinstance(await learner.receive(Refused), Refused)
        silent.close()
        learner.close()
        server.close()

    asyncio.run(run())


def test_one_long_message_after_the_other_is_no_endless_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_UNFINISHED_BYTES", 3 * MIB)

    async def run() -> None:
        monkeypatch.setattr("protocol.strangers.MAX_BYTES_PER_S", 1 << 40)
        server = ServerChannel("tcp://127.0.0.1:*")
        learner = ScriptedLearner(server.endpoint)
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(20):
                await learner.send(Ack(group_ids=["x" * MIB]))
                server.look_at_connections()
                _, message = await server.receive()
                assert isinstance(message, Ack)
                server.look_at_connections()
        learner.close()
        server.close()

    asyncio.run(run())
