"""The channel over real sockets: delivery, malformed peers, peers that are gone."""

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from protocol.channel.loop_socket import MAX_TURN_S, LoopSocket
from protocol.channel.sockets import LearnerChannel, ServerChannel
from protocol.errors import ConfigError, DeadlineExceeded, ProtocolError
from protocol.messages import Ack, Refused

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 60.0


def with_channels(
    test: Callable[[ServerChannel, LearnerChannel], Awaitable[None]], timeout_s: float = TIMEOUT_S
) -> None:
    async def run() -> None:
        server = ServerChannel("tcp://127.0.0.1:*")
        learner = LearnerChannel(server.endpoint)
        try:
            await asyncio.wait_for(test(server, learner), timeout_s)
        finally:
            learner.close()
            server.close()

    asyncio.run(run())


def test_messages_arrive_both_ways() -> None:
    async def test(server: ServerChannel, learner: LearnerChannel) -> None:
        await learner.send(Ack(group_ids=["1.0"]), TIMEOUT_S)
        peer, message = await server.receive()
        assert isinstance(message, Ack) and message.group_ids == ["1.0"]
        assert await server.send(peer, Refused(reason="no"))
        answer = await learner.receive()
        assert isinstance(answer, Refused) and answer.reason == "no"

    with_channels(test)


def test_a_send_that_ends_in_the_moment_in_which_it_is_cancelled_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: ServerChannel, learner: LearnerChannel) -> None:
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(LoopSocket, "send", lambda *args: sent)
        sending = asyncio.create_task(learner.send(Ack(group_ids=[]), TIMEOUT_S))
        await asyncio.sleep(0)
        sent.set_result(None)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    with_channels(test)


def test_a_malformed_message_comes_with_its_sender_and_the_next_one_is_read() -> None:
    async def test(server: ServerChannel, learner: LearnerChannel) -> None:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(server.endpoint)
        stranger.send(b"\xc1 not msgpack")
        peer, message = await server.receive()
        assert peer and isinstance(message, ProtocolError)
        stranger.close(linger=0)
        context.term()
        await learner.send(Ack(group_ids=[]), TIMEOUT_S)
        assert isinstance((await server.receive())[1], Ack)

    with_channels(test)


def test_a_frame_above_the_limit_costs_its_sender_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocol.channel.sockets.MAX_FRAME_BYTES", 1000)

    async def test(server: ServerChannel, learner: LearnerChannel) -> None:
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.connect(server.endpoint)
        stranger.send(b"x" * 2000)
        await learner.send(Ack(group_ids=["mine"]), TIMEOUT_S)
        _, message = await server.receive()
        assert isinstance(message, Ack) and message.group_ids == ["mine"]
        stranger.close(linger=0)
        context.term()

    with_channels(test)


def test_sending_to_a_peer_that_is_gone_says_so() -> None:
    async def test(server: ServerChannel, learner: LearnerChannel) -> None:
        second = LearnerChannel(server.endpoint)
        await second.send(Ack(group_ids=[]), TIMEOUT_S)
        peer, _ = await server.receive()
        second.close()
        while await server.send(peer, Refused(reason="are you there?")):
            await asyncio.sleep(0.05)

    with_channels(test)


def test_a_full_queue_leaves_other_tasks_their_turn_again_and_again() -> None:
    async def test(server: ServerChannel, learner: LearnerChannel) -> None:
        for _ in range(50):
            await learner.send(Ack(group_ids=[]), TIMEOUT_S)
        await asyncio.sleep(0.5)  # all of them are in the queue now
        num_received = 0
        had_its_turn_after = []

        async def other() -> None:
            while num_received < 50:
                had_its_turn_after.append(num_received)
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(50):
            await server.receive()
            num_received += 1
            time.sleep(MAX_TURN_S / 4)  # what is done with a message
        turns = [0, *had_its_turn_after, 50]
        assert max(later - earlier for earlier, later in itertools.pairwise(turns)) < 10
        await task

    with_channels(test)


def test_a_peer_that_fills_the_queue_and_hangs_up_does_not_take_the_server_with_it() -> None:
    """With pings of its own, libzmq 4.3.5 aborts the server's process; so the server runs in another one here."""
    script = f"""
import asyncio, zmq
from protocol.channel.sockets import HEARTBEAT_INTERVAL_MS, SERVER_RECEIVE_HIGH_WATER_MARK, ServerChannel

async def run():
    server = ServerChannel("tcp://127.0.0.1:*")
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.SNDHWM, 1)
    peer.setsockopt(zmq.SNDTIMEO, 500)
    peer.connect(server.endpoint)
    num_sent = 0
    try:
        while num_sent < {10**6}:
            peer.send(b"x" * {10**5})
            num_sent += 1
    except zmq.Again:
        assert num_sent > SERVER_RECEIVE_HIGH_WATER_MARK
    peer.close(linger=0)
    context.term()
    await asyncio.sleep(3 * HEARTBEAT_INTERVAL_MS / 1000)
    server.close()
    print("the queue was full after", num_sent)

asyncio.run(run())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "the queue was full" in done.stdout, done.stderr


def test_a_learner_that_freezes_is_gone_for_the_server_within_seconds() -> None:
    """The server does not ping; it looks whether anything still comes."""
    script = """
import asyncio, os, signal, sys
from protocol.channel.sockets import LearnerChannel
from protocol.messages import Ack

async def run():
    await LearnerChannel(sys.argv[1]).send(Ack(group_ids=[]), 10)
    await asyncio.sleep(2.5)
    os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(run())
"""

    async def test(server: ServerChannel, learner: LearnerChannel) -> None:
        frozen = subprocess.Popen([sys.executable, "-c", script, server.endpoint], cwd=ROOT)
        try:
            peer, _ = await server.receive()
            await asyncio.sleep(3)
            while await server.send(peer, Refused(reason="are you there?")):
                server.poll_connections()
                await asyncio.sleep(0.1)
        finally:
            frozen.kill()
            frozen.wait()

    with_channels(test, timeout_s=30.0)


def test_sending_without_a_server_ends_at_the_deadline() -> None:
    async def run() -> None:
        learner = LearnerChannel("tcp://127.0.0.1:9")
        try:
            with pytest.raises(DeadlineExceeded, match=r"Ack could not be sent to tcp://127.0.0.1:9 within 0.2 s"):
                await learner.send(Ack(group_ids=[]), 0.2)
        finally:
            learner.close()

    asyncio.run(run())


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    async def run() -> None:
        first = ServerChannel("tcp://127.0.0.1:*")
        try:
            with pytest.raises(ConfigError, match=f"cannot listen on {first.endpoint}.*already in use.*`endpoint`"):
                ServerChannel(first.endpoint)
        finally:
            first.close()

    asyncio.run(run())


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/x", "127.0.0.1:5757", "tcp://127.0.0.1", "tcp://h:99999", "tcp://:1"])
def test_an_endpoint_that_is_not_tcp_with_host_and_port_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="expected tcp://HOST:PORT"):
        LearnerChannel(endpoint)
