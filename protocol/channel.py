"""The typed ZeroMQ channel: a ROUTER on the server, one DEALER per server on the learner.

It moves messages and nothing else. What must survive a lost connection is sent again by the layers above, so a send
never queues to a peer that is not there (IMMEDIATE, ROUTER_MANDATORY), and every limit that ZeroMQ leaves open by
default is set here. Only tcp: `ipc://` loses messages when a peer exits while the reader is slow (libzmq #4660).
"""

import asyncio

import zmq
import zmq.asyncio

from protocol.codec import decode, encode
from protocol.errors import ConfigError, DeadlineExceeded, ProtocolError
from protocol.messages import LearnerMessage, Message, ServerMessage

HEARTBEAT_INTERVAL_MS = 1_000
DEAD_PEER_TIMEOUT_MS = 3_000
HIGH_WATER_MARK = 1_000
"""Messages per peer and direction; beyond it the sender is told, nothing is dropped unseen."""
MAX_FRAME_BYTES = 256 << 20
"""A frame above it costs its sender the connection before memory is allocated for it."""
LINGER_MS = 1_000
"""Time for last messages (acks) to leave at close."""


def _socket(context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_PEER_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, DEAD_PEER_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, DEAD_PEER_TIMEOUT_MS)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    return socket


def _check_endpoint(endpoint: str) -> None:
    host_and_port = endpoint.removeprefix("tcp://")
    host, _, port = host_and_port.rpartition(":")
    if host_and_port == endpoint or not host or not (port == "*" or (port.isdigit() and int(port) < 65536)):
        raise ConfigError(f"endpoint is {endpoint!r}; expected tcp://HOST:PORT, for example tcp://127.0.0.1:5757")


class ServerChannel:
    """The server's end: receives from any learner, sends to one by its peer id.

    Raises ConfigError when the address cannot be bound.
    """

    def __init__(self, endpoint: str) -> None:
        _check_endpoint(endpoint)
        self._context = zmq.asyncio.Context()
        self._socket = _socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen on {endpoint}: {error.strerror}. "
                "Stop the process that holds the port, or choose another with `endpoint` in the config."
            ) from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def receive(self) -> tuple[bytes, LearnerMessage | ProtocolError]:
        """Return the next message and its sender; a malformed one comes back as the error, so the caller can answer."""
        peer, *frames = await self._socket.recv_multipart()
        try:
            return peer, decode(frames, LearnerMessage)  # type: ignore[arg-type]
        except ProtocolError as error:
            return peer, error

    async def send(self, peer: bytes, message: Message) -> bool:
        """Send without waiting; False if the peer is gone or its queue is full (the caller keeps what matters)."""
        try:
            await self._socket.send_multipart([peer, *encode(message)], flags=zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class LearnerChannel:
    """The learner's end: one connection to one server, re-made by ZeroMQ whenever it breaks."""

    def __init__(self, endpoint: str) -> None:
        _check_endpoint(endpoint)
        self.endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._socket = _socket(self._context, zmq.DEALER)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        self._socket.connect(endpoint)

    async def send(self, message: Message, timeout_s: float) -> None:
        """Hand a message to a live connection. Raises DeadlineExceeded when there is none for `timeout_s`."""
        try:
            await asyncio.wait_for(self._socket.send_multipart(encode(message)), timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{type(message).__name__} could not be sent to {self.endpoint} within {timeout_s} s: "
                "the server is not connected or does not read."
            ) from error

    async def receive(self) -> ServerMessage:
        """Return the server's next message. Raises ProtocolError if it is not one."""
        return decode(await self._socket.recv_multipart(), ServerMessage)  # type: ignore[arg-type]

    def close(self) -> None:
        self._socket.close()
        self._context.term()
