"""The channel over real sockets: delivery, malformed peers, peers that are gone."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import zmq

from protocol.channel import LearnerChannel, ServerChannel
from protocol.errors import ConfigError, DeadlineExceeded, ProtocolError
from protocol.messages import Ack, Refused

TIMEOUT_S = 10.0


def with_channels(test: Callable[[ServerChannel, LearnerChannel], Awaitable[None]]) -> None:
    async def run() -> None:
        server = ServerChannel("tcp://127.0.0.1:*")
        learner = LearnerChannel(server.endpoint)
        try:
            await asyncio.wait_for(test(server, learner), TIMEOUT_S)
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
    monkeypatch.setattr("protocol.channel.MAX_FRAME_BYTES", 1000)

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
