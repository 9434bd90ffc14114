"""A socket of ZeroMQ in asyncio's event loop: whole messages, without a thread and without a turn of the loop for each.

pyzmq has such a socket too. It makes a future for each message, and with each frame asks or tells libzmq by an enum whether there
are more, which takes longer than to move the frame: a small group, of 17 frames, costs two to three times as much.

Invariant: nobody waits for what has happened already. libzmq tells of news once, by a descriptor, and any call may take that
notice away; so after each call those who wait are looked after.
"""

import asyncio
import time
from collections.abc import Sequence

import zmq

WITHOUT_WAITING = int(zmq.DONTWAIT)
MORE_TO_COME = int(zmq.DONTWAIT | zmq.SNDMORE)
EVENTS, READABLE, WRITABLE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
"""As plain numbers: to combine two of pyzmq's enums takes as long as to send a frame."""
MAX_TURN_S = 0.001
"""So long may messages be received before other tasks of the event loop have their turn."""


class LoopSocket:
    """Of one event loop, in which any task may send and receive."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._news = int(socket.getsockopt(zmq.FD))
        """The descriptor by which libzmq tells that something has happened."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """That tells of news; None before somebody has waited for them."""
        self._waiting: dict[asyncio.Future[None], int] = {}
        """For the socket to be READABLE or WRITABLE."""
        self._turn_to_send = asyncio.Lock()
        self._turn_began = time.monotonic()

    def send_now(self, frames: Sequence[bytes]) -> None:
        """Send a message. Raises zmq.Again if that has to wait, another zmq.ZMQError if it cannot be sent."""
        *first, last = frames
        try:
            for frame in first:
                self._socket.send(frame, MORE_TO_COME)
            self._socket.send(last, WITHOUT_WAITING)
        finally:
            self._look_after_those_who_wait()

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send a message once a peer is there and takes it, after those that others have begun to send."""
        async with self._turn_to_send:
            while True:
                try:
                    return self.send_now(frames)
                except zmq.Again:
                    await self._until(WRITABLE)

    async def receive(self) -> list[zmq.Frame]:
        """Return the frames of the next message."""
        if time.monotonic() - self._turn_began > MAX_TURN_S:
            await asyncio.sleep(0)  # only this lets other tasks run while a peer floods
            self._turn_began = time.monotonic()
        while True:
            try:
                return self._receive_now()
            except zmq.Again:
                await self._until(READABLE)
                self._turn_began = time.monotonic()

    def _receive_now(self) -> list[zmq.Frame]:
        try:
            frames = [self._socket.recv(WITHOUT_WAITING, copy=False)]
            while frames[-1].more:
                frames.append(self._socket.recv(WITHOUT_WAITING, copy=False))
        finally:
            self._look_after_those_who_wait()
        return frames

    async def _until(self, event: int) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._news, self._take_notice)
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting[waiter] = event
        try:
            await waiter
        finally:
            del self._waiting[waiter]

    def _look_after_those_who_wait(self) -> None:
        if self._waiting:
            self._take_notice()

    def _take_notice(self) -> None:
        """Wake those for whom something has happened; whether there are any or not, or the descriptor would tell of it for ever."""
        events = int(self._socket.get(EVENTS))
        for waiter, event in self._waiting.items():
            if events & event and not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Whoever waits is cancelled."""
        if self._loop is not None:
            self._loop.remove_reader(self._news)
        for waiter in self._waiting:
            waiter.cancel()
        self._socket.close()
