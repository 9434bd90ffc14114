"""A socket in the event loop over real connections: no task waits for an event that has already happened."""

import asyncio
import select
import time
from collections.abc import Awaitable, Iterator
from contextlib import closing

import pytest
import zmq

from protocol.channel.loop_socket import LoopSocket, SocketClosed
from tests.event_loop import in_event_loop

TIMEOUT_S = 20.0
LONGER_THAN_LIBZMQ_IGNORES_NEWS_S = 0.1
"""libzmq checks for events in a send at most every 3 million ticks."""


class Pair:
    """A listening socket in the loop, and a plain socket that has not connected yet."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._plain_ours, self._theirs = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        port = self._plain_ours.bind_to_random_port("tcp://127.0.0.1")
        self._endpoint = f"tcp://127.0.0.1:{port}"
        self.ours = LoopSocket(self._plain_ours)

    def connect(self) -> zmq.Socket[bytes]:
        self._theirs.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
        self._theirs.connect(self._endpoint)
        return self._theirs

    def has_news(self, timeout_s: float) -> bool:
        """Return whether libzmq would notify the event loop."""
        return bool(select.select([self._plain_ours.getsockopt(zmq.FD)], [], [], timeout_s)[0])

    def close(self) -> None:
        self.ours.close()
        self._theirs.close(linger=0)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with zmq.Context() as context, closing(Pair(context)) as pair:
        yield pair


async def received(socket: LoopSocket) -> list[bytes]:
    return [frame.bytes for frame in await socket.receive()]


async def begun(task: Awaitable[object]) -> asyncio.Future[object]:
    """Start a task and run it to its first wait or its end."""
    task = asyncio.ensure_future(task)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def connected(pair: Pair) -> zmq.Socket[bytes]:
    theirs = pair.connect()
    await pair.ours.send([b"are you there?"])
    theirs.recv_multipart()
    return theirs


@in_event_loop
async def test_messages_that_arrive_during_a_send_are_received(pair: Pair) -> None:
    theirs = await connected(pair)
    receiving = await begun(received(pair.ours))
    theirs.send_multipart([b"a", b"", b"b"])
    assert pair.has_news(TIMEOUT_S)
    time.sleep(LONGER_THAN_LIBZMQ_IGNORES_NEWS_S)
    pair.ours.send_now([b"takes the notice away"])
    assert not pair.has_news(0)
    pair.ours.send_now([b"wakes nobody a second time"])
    assert await receiving == [b"a", b"", b"b"]


@in_event_loop
async def test_waiting_messages_are_sent_when_a_peer_connects_during_a_receive(pair: Pair) -> None:
    sending = await begun(pair.ours.send([b"at last"]))
    assert not sending.done()
    theirs = pair.connect()
    assert pair.has_news(TIMEOUT_S)
    time.sleep(LONGER_THAN_LIBZMQ_IGNORES_NEWS_S)
    receiving = pair.ours.receive()
    receiving.send(None)  # to its yield to other tasks
    receiving.send(None)  # to its wait, without a turn of the loop
    assert not pair.has_news(0)
    await sending
    assert theirs.recv_multipart() == [b"at last"]
    receiving.close()


@in_event_loop
async def test_waiting_messages_keep_their_order(pair: Pair) -> None:
    sending = [await begun(pair.ours.send([b"%d" % number])) for number in range(5)]
    theirs = pair.connect()
    assert pair.has_news(TIMEOUT_S)
    sending.append(await begun(pair.ours.send([b"5"])))
    await asyncio.gather(*sending)
    assert [theirs.recv() for _ in sending] == [b"%d" % number for number in range(6)]


@in_event_loop
async def test_a_cancelled_receive_loses_no_message(pair: Pair) -> None:
    theirs = await connected(pair)
    receiving = await begun(received(pair.ours))
    theirs.send(b"came in that moment")
    assert pair.has_news(TIMEOUT_S)
    pair.ours.send_now([b"wakes whoever receives"])
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    assert await received(pair.ours) == [b"came in that moment"]


@in_event_loop
async def test_several_tasks_can_receive_and_one_can_be_cancelled(pair: Pair) -> None:
    theirs = await connected(pair)
    first, second, third = [await begun(received(pair.ours)) for _ in range(3)]
    first.cancel()
    theirs.send(b"a")
    theirs.send(b"b")
    assert sorted([await second, await third]) == [[b"a"], [b"b"]]


@in_event_loop
async def test_a_message_of_too_many_frames_is_cut_short_and_the_next_one_is_whole(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.ours, "_max_frames", 3)
    monkeypatch.setattr("protocol.channel.loop_socket.MAX_TURN_S", 0.0)
    theirs = await connected(pair)
    receiving = [await begun(received(pair.ours)) for _ in range(3)]
    theirs.send_multipart([b"%d" % number for number in range(1000)])
    theirs.send_multipart([b"a", b"b", b"c"])
    theirs.send(b"d")
    assert sorted(await asyncio.gather(*receiving)) == [[b"0", b"1", b"2"], [b"a", b"b", b"c"], [b"d"]]


@in_event_loop
async def test_unread_messages_do_not_keep_the_event_loop_busy(pair: Pair) -> None:
    theirs = await connected(pair)
    (await begun(received(pair.ours))).cancel()  # from now on the loop watches the socket
    theirs.send(b"later")
    assert pair.has_news(TIMEOUT_S)
    await asyncio.sleep(0.1)
    assert not pair.has_news(0)
    assert await received(pair.ours) == [b"later"]


@in_event_loop
async def test_at_a_closed_socket_waiting_readers_are_cancelled_and_writers_get_an_error(pair: Pair) -> None:
    """The error is for a task that has more to do than to send, which nobody has cancelled."""
    reading, *writing = [
        await begun(task)
        for task in (received(pair.ours), pair.ours.send([b"nobody is there"]), pair.ours.send([b"the next in line"]))
    ]
    pair.ours.close()
    await asyncio.wait([reading, *writing])
    assert reading.cancelled()
    assert [type(task.exception()) for task in writing] == [SocketClosed, SocketClosed]
