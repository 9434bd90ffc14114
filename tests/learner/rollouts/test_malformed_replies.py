"""Thousands of malformed messages between a server's answers: they are rejected and counted, and rollouts continue."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import zmq

from protocol.channel.sockets import ServerChannel
from protocol.codec import decode
from protocol.errors import ProtocolError
from protocol.messages import GroupFailed, Message, Pulse, ServerMessage, Welcome
from tests.learner.rollouts.hand_server import HandServer, counts, next_slots, rollouts_on
from tests.malformed import TO_LEARNER, Frames, malformed_messages
from tests.waiting import until

BATCH, NUM_STEPS = 100, 10


class TamperedServer(HandServer):
    """A server whose connection injects other messages before each answer."""

    def __init__(self) -> None:
        super().__init__()
        self._messages = harmless(malformed_messages([*TO_LEARNER], seed=0))
        self.num_sent = self.num_malformed = 0

    async def _send(self, channel: ServerChannel, peer: bytes, answer: Message) -> None:
        for _ in range(BATCH):
            frames, is_malformed = next(self._messages)
            await send_all(channel, [peer, *frames])
            self.num_sent += 1
            self.num_malformed += is_malformed
        await super()._send(channel, peer, answer)


async def send_all(channel: ServerChannel, frames: Frames) -> None:
    while True:
        try:
            channel._messages.send_now(frames)
        except zmq.Again:  # the learner reads more slowly
            await asyncio.sleep(0.001)
        else:
            return


def harmless(messages: Iterator[Frames]) -> Iterator[tuple[Frames, bool]]:
    """Omit messages that still decode and change the server's state: another server, another engine, or an end."""
    for frames in messages:
        try:
            message: Message = decode(frames, ServerMessage)  # type: ignore[arg-type]
        except ProtocolError:
            yield frames, True
            continue
        ends = isinstance(message, GroupFailed) and message.code == "draining"
        if not isinstance(message, Welcome | Pulse) and not ends:
            yield frames, False


def test_malformed_messages_are_rejected_and_counted_and_rollouts_continue(tmp_path: Path) -> None:
    with TamperedServer() as server, rollouts_on(tmp_path, server, max_staleness=0) as (fleet, rollouts):
        for version in range(NUM_STEPS):
            server.version = version
            rollouts.publish(version, server.server_id)
            assert next_slots(rollouts, version) == [3 * version, 3 * version + 1, 3 * version + 2]
        until(lambda: fleet.metrics()["rollout/messages_refused"] == server.num_malformed)
        assert server.num_malformed > 0.5 * server.num_sent >= 0.5 * BATCH * 3 * NUM_STEPS
    assert (counts(tmp_path).lost, counts(tmp_path).dropped) == (0, 0)
