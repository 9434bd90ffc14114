"""ZeroMQ socket for asyncio, without a thread or a loop iteration per message.

pyzmq has an asyncio socket too. It makes a future per message, and uses an enum per frame to read or set
whether more frames follow. That takes longer than moving the frame: a small group of 17 frames costs two to
three times as much.

libzmq signals an event once, through a descriptor, and any call may consume the signal. After each call, the
waiting tasks are therefore checked.
Invariant: no task waits for an event that has already happened.
"""

import asyncio
import math
import time
from collections.abc import Sequence

import zmq

WITHOUT_WAITING = int(zmq.DONTWAIT)
MORE_TO_COME = int(zmq.DONTWAIT | zmq.SNDMORE)
EVENTS, READABLE, WRITABLE = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.POLLOUT)
"""ZeroMQ constants as plain integers. Combining two of pyzmq's enums takes as long as sending a frame."""
MAX_TURN_S = 0.001
"""Maximum time to receive messages before other tasks of the event loop run, in seconds."""


class SocketClosed(Exception):
    """The socket was closed before a message was sent."""


class LoopSocket:
    """Socket of one event loop, in which any task may send and receive."""

    def __init__(self, socket: zmq.Socket[bytes], max_frames: float = math.inf) -> None:
        """Wrap a socket. A message of more than `max_frames` frames is cut short when it is received."""
        self._socket, self._max_frames = socket, max_frames
        self._has_rest = False
        """Whether the message received last was cut short, and its other frames are still to be skipped."""
        self._signal = int(socket.getsockopt(zmq.FD))
        """Descriptor through which libzmq signals events."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Loop that watches the descriptor. None until a task has waited."""
        self._waiting: dict[asyncio.Future[None], int] = {}
        """Waiting tasks, each with the state that it waits for: READABLE or WRITABLE."""
        self._send_lock = asyncio.Lock()
        self._turn_started = time.monotonic()

    def send_now(self, frames: Sequence[bytes]) -> None:
        """Send a message without waiting.

        Raises:
            zmq.Again: If sending would have to wait.
            zmq.ZMQError: If the message cannot be sent.
        """
        *first, last = frames
        try:
            for frame in first:
                self._socket.send(frame, MORE_TO_COME)
            self._socket.send(last, WITHOUT_WAITING)
        finally:
            self._wake_waiting_tasks()

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send a message once a connected peer accepts it.

        Messages that other tasks are already sending go first.

        Raises:
            SocketClosed: The socket was closed meanwhile.
        """
        async with self._send_lock:
            while True:
                if self._socket.closed:
                    raise SocketClosed
                try:
                    return self.send_now(frames)
                except zmq.Again:
                    await self._until(WRITABLE)

    async def receive(self) -> list[zmq.Frame]:
        """Return the frames of the next message. If it was cut short, the last one has `more` set."""
        if time.monotonic() - self._turn_started > MAX_TURN_S:
            await asyncio.sleep(0)  # the only point at which other tasks run while a peer floods
            self._turn_started = time.monotonic()
        while True:
            if self._has_rest:
                await self._skip_rest()
            try:
                return self._receive_now()
            except zmq.Again:
                await self._until(READABLE)
                self._turn_started = time.monotonic()

    def _receive_now(self) -> list[zmq.Frame]:
        try:
            frames = [self._socket.recv(WITHOUT_WAITING, copy=False)]
            while frames[-1].more and len(frames) < self._max_frames:
                frames.append(self._socket.recv(WITHOUT_WAITING, copy=False))
            self._has_rest = frames[-1].more
        finally:
            self._wake_waiting_tasks()
        return frames

    async def _skip_rest(self) -> None:
        """Skip the rest of a message that was cut short, a turn at a time: it may be millions of frames.

        None of them is waited for, because libzmq delivers whole messages.
        """
        while self._has_rest:
            self._has_rest = self._socket.recv(WITHOUT_WAITING, copy=False).more
            if time.monotonic() - self._turn_started > MAX_TURN_S:
                self._wake_waiting_tasks()
                await asyncio.sleep(0)
                self._turn_started = time.monotonic()

    async def _until(self, event: int) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._signal, self._wake_ready_tasks)
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting[waiter] = event
        try:
            await waiter
        finally:
            del self._waiting[waiter]

    def _wake_waiting_tasks(self) -> None:
        if self._waiting:
            self._wake_ready_tasks()

    def _wake_ready_tasks(self) -> None:
        """Wake the tasks whose event has happened.

        The events must be read even without waiting tasks, or the descriptor would signal forever.
        """
        events = int(self._socket.get(EVENTS))
        for waiter, event in self._waiting.items():
            if events & event and not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Close the socket, cancel the tasks that wait to receive, and let `send` raise in those that wait to send.

        A task that sends may have more to do, such as to store groups that another server sends.
        """
        if self._loop is not None:
            self._loop.remove_reader(self._signal)
        self._socket.close()
        for waiter, event in self._waiting.items():
            if event == READABLE:
                waiter.cancel()
            elif not waiter.done():
                waiter.set_result(None)
