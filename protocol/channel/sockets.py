"""ZeroMQ channel: a ROUTER on the server, a DEALER per server on the learner.

The channel only moves messages. The layers above resend what must survive a lost connection, so a send never
queues for a missing peer (IMMEDIATE, ROUTER_MANDATORY). All limits that ZeroMQ leaves open are set here. Only
tcp is supported: `ipc://` loses messages when a peer exits while the reader is slow (libzmq #4660).

With keys, every connection is CURVE. Unknown keys, keys of another server and plain-text clients fail in
libzmq's own threads and never reach `receive`. With or without keys, a peer that is not admitted may send
enough for any Hello, and is cut off above that (`PeerLimits`).
"""

import asyncio
import enum
import logging
import socket
import time
from collections import Counter, deque

import zmq
from zmq.auth.thread import ThreadAuthenticator

from protocol.channel.keys import LearnerKeys, ServerKeys
from protocol.channel.liveness import Connections, Failure, Monitor, address_of
from protocol.channel.loop_socket import LoopSocket, SocketClosed
from protocol.codec import Decoder, encode
from protocol.endpoint import check_endpoint, needs_ipv6, split_endpoint
from protocol.errors import ConfigError, DeadlineExceeded, HandshakeRefused, ProtocolError
from protocol.messages import LearnerMessage, Message, ServerMessage

log = logging.getLogger(__name__)
MAX_MESSAGES_PER_S = 1_000
NUM_REMEMBERED = 1_000
MAX_BYTES_PER_S = 1 << 20
"""Maximum number of bytes that a stranger may send per second. Decoding them takes the server tens of
milliseconds and tens of MiB, whatever they contain."""
MAX_STRANGER_UNFINISHED_BYTES = 2 * MAX_BYTES_PER_S
"""Maximum number of bytes of a stranger without a whole message. In memory they may be 32 times as many: an empty
frame is 2 bytes on the wire, and 64 in libzmq."""
MAX_UNFINISHED_BYTES = 128 << 20
"""The same for the admitted peer: four frames of maximum size."""
MAX_FRAMES = 16
"""Maximum number of frames that the server reads of a message. The sender's id comes first, and no message has more
than a header and one array."""
HEARTBEAT_INTERVAL_MS = 500
DEAD_PEER_TIMEOUT_MS = 2_000
"""Maximum time without a byte. With a check twice a second, a dead peer is noticed within 3 s."""
HANDSHAKE_TIMEOUT_MS = 3_000
HIGH_WATER_MARK = 1_000
"""Maximum number of queued messages per peer and direction. Beyond it, the sender gets an error, and no
message is dropped silently."""
SERVER_RECEIVE_HIGH_WATER_MARK = 100
"""Maximum number of messages of one learner that wait in the server's memory. Further ones wait at the
learner."""
MAX_FRAME_BYTES = 32 << 20
"""Maximum size of a frame that the server accepts. A larger frame costs its sender the connection, before memory
is allocated. The largest frame that is sent is the manifest of a weight sync: 90 bytes per tensor."""
MAX_SERVER_FRAME_BYTES = 1 << 30
"""Maximum size of a frame that the learner accepts. The largest one has the routed experts of a completion: up to a
kilobyte per token."""
MAX_PONG_BYTES = 256
"""Upper bound of the bytes of pongs between two checks."""
LINGER_MS = 1_000
"""Time for the last messages, such as acks, to leave at close."""
EVERY_ADDRESS = ("0.0.0.0", "::")


class PeerLimits:
    """Rate limits for peers that are not admitted, and the peers cut off last."""

    def __init__(self) -> None:
        self._second_began = time.monotonic()
        self._num_messages: Counter[bytes] = Counter()
        self._num_bytes: Counter[bytes] = Counter()
        self._cut_off: deque[bytes] = deque(maxlen=NUM_REMEMBERED)

    def allow(self, peer: bytes, num_bytes: int) -> bool:
        """Count a message, and return whether its sender is within the limits.

        The limits apply to each second.
        """
        now = time.monotonic()
        if now - self._second_began > 1:
            self._second_began = now
            self._num_messages.clear()
            self._num_bytes.clear()
        self._num_messages[peer] += 1
        self._num_bytes[peer] += num_bytes
        return self._num_messages[peer] <= MAX_MESSAGES_PER_S and self._num_bytes[peer] <= MAX_BYTES_PER_S

    def is_cut_off(self, peer: bytes) -> bool:
        """Return whether the peer's connection was closed before.

        Messages that the peer sent until then may still be in the queue.
        """
        return peer in self._cut_off

    def cut_off(self, peer: bytes) -> None:
        self._cut_off.append(peer)


def _open(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, max_frame_bytes: int) -> zmq.Socket[bytes]:
    opened = context.socket(kind)
    # Not for every endpoint: ZeroMQ would search for IPv6 addresses only, and reach IPv4 addresses in mapped
    # form.
    opened.setsockopt(zmq.IPV6, needs_ipv6(split_endpoint(endpoint)[0]))
    opened.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    opened.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    opened.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    opened.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    opened.setsockopt(zmq.LINGER, LINGER_MS)
    return opened


class SendResult(enum.Enum):
    """Outcome of a send. True if the message is on its way."""

    SENT = enum.auto()
    QUEUE_FULL = enum.auto()
    """The peer is connected, but its queue is full."""
    PEER_GONE = enum.auto()

    def __bool__(self) -> bool:
        return self is SendResult.SENT


class ServerChannel:
    """The server's end: receives from any learner, sends to one by its peer id.

    Raises:
        ConfigError: The address cannot be bound, or needs keys or `insecure` because it is not loopback.
    """

    def __init__(self, endpoint: str, keys: ServerKeys | None = None, *, insecure: bool = False) -> None:
        check_endpoint(endpoint, has_keys=keys is not None, insecure=insecure)
        self._context = zmq.Context()
        self._socket = _open(self._context, zmq.ROUTER, endpoint, MAX_FRAME_BYTES)
        self._messages = LoopSocket(self._socket, MAX_FRAMES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.RCVHWM, SERVER_RECEIVE_HIGH_WATER_MARK)
        self._decoder: Decoder[LearnerMessage] = Decoder(LearnerMessage)  # type: ignore[arg-type]
        self._peer_limits = PeerLimits()
        self._admitted: bytes | None = None
        self._peer_of: dict[int, bytes] = {}
        """Sender of the last message by descriptor, which may be closed since."""
        self.num_shut_out = 0
        """Number of messages dropped unread, beyond what strangers may send."""
        self._monitor = Monitor(self._context, self._socket)
        self._gate = self._lock(keys) if keys is not None else None
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"cannot listen on {endpoint}: {error.strerror}. "
                "Stop the process that uses the port, or choose another port with `endpoint` in the config."
            ) from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        host, port = split_endpoint(self.endpoint)
        self._own = (host, int(port))
        self._connections = Connections(self._is_ours, DEAD_PEER_TIMEOUT_MS, self._max_unfinished_bytes)

    def _is_ours(self, connection: socket.socket) -> bool:
        """Return whether a connection was made to the address of this socket.

        If the socket listens on all addresses, only the port must match.
        """
        address = address_of(connection.getsockname())
        listens_everywhere = self._own[0] in EVERY_ADDRESS
        return address == self._own or (listens_everywhere and address is not None and address[1] == self._own[1])

    def _max_unfinished_bytes(self, descriptor: int) -> int:
        is_admitted = self._admitted is not None and self._peer_of.get(descriptor) == self._admitted
        return MAX_UNFINISHED_BYTES if is_admitted else MAX_STRANGER_UNFINISHED_BYTES

    def _lock(self, keys: ServerKeys) -> ThreadAuthenticator:
        """Admit only listed keys.

        A separate thread checks them, because the event loop blocks while vLLM starts.
        """
        allow_list = _AllowList(keys)
        gate = ThreadAuthenticator(self._context)
        gate.start()
        gate.configure_curve_callback(credentials_provider=allow_list)
        self._socket.curve_secretkey, self._socket.curve_publickey = keys.secret, keys.public
        self._socket.curve_server = True
        return gate

    async def receive(self) -> tuple[bytes, LearnerMessage | ProtocolError]:
        """Return the next message and its sender.

        A malformed message is returned as the error, so that the caller can answer. A peer that is not
        admitted and exceeds the limits of strangers is cut off here.
        """
        while True:
            peer_frame, *frames = await self._messages.receive()
            # A full queue returns without waiting, so only this lets other tasks run while a peer floods. It
            # also lets the work of each message start before the next message is read.
            await asyncio.sleep(0)
            peer, descriptor = peer_frame.bytes, int(frames[0].get(zmq.SRCFD))
            self._connections.finished_message(descriptor)
            self._peer_of[descriptor] = peer
            if peer != self._admitted and self._is_shut_out(peer, descriptor, frames):
                self.num_shut_out += 1
                continue
            try:
                return peer, self._decoder.decode(frames)
            except ProtocolError as error:
                return peer, error

    def admit(self, peer: bytes | None) -> None:
        """Set the one peer that is no stranger, or None.

        What it sends has only the limits of each message.
        """
        self._admitted = peer

    def _is_shut_out(self, peer: bytes, descriptor: int, frames: list[zmq.Frame]) -> bool:
        if self._peer_limits.is_cut_off(peer):
            return True
        has_too_many_frames = frames[-1].more
        if self._peer_limits.allow(peer, sum(len(frame) for frame in frames)) and not has_too_many_frames:
            return False
        self._peer_limits.cut_off(peer)
        self._connections.disconnect(descriptor, "it exceeded the limits for a peer whose Hello is not accepted")
        return True

    def poll_connections(self) -> None:
        """Disconnect silent peers, and those that send an endless message.

        Call it twice a second.
        """
        self._monitor.read()
        self._connections.check(self._monitor.descriptors)

    def pop_failed_handshakes(self) -> Counter[Failure]:
        """Return the number of failed handshakes since the last call, by reason."""
        return Counter(self._monitor.pop_failures())

    async def send(self, peer: bytes, message: Message) -> SendResult:
        """Send without waiting.

        A message that is not sent is lost, so the caller keeps what matters.
        """
        try:
            self._messages.send_now([peer, *encode(message)])
        except zmq.Again:
            return SendResult.QUEUE_FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return SendResult.PEER_GONE
            raise
        return SendResult.SENT

    def close(self) -> None:
        self._messages.close()
        self._monitor.close()
        if self._gate is not None:
            self._gate.stop()
        self._context.term()


class _AllowList:
    """Credentials provider for pyzmq's authenticator, with the allowed keys.

    An exception would end the authenticator's thread, which then admits nobody and cannot be stopped.
    """

    def __init__(self, keys: ServerKeys) -> None:
        self._keys, self._known = keys, keys.allowed()

    def callback(self, domain: str, key: bytes) -> bool:
        try:
            self._known = self._keys.allowed()
        except OSError as error:
            log.warning("%s cannot be read (%s); admitting the keys read last", self._keys.allowed_in, error)
        return key in self._known


class LearnerChannel:
    """The learner's end: one connection to one server, which ZeroMQ restores.

    Raises:
        ConfigError: The address is not that of a server, or needs keys or `insecure` because it is not loopback.
    """

    def __init__(self, endpoint: str, keys: LearnerKeys | None = None, *, insecure: bool = False) -> None:
        check_endpoint(endpoint, has_keys=keys is not None, insecure=insecure, connects=True)
        self.endpoint = endpoint
        self._has_keys = keys is not None
        self._context = zmq.Context()
        self._socket = _open(self._context, zmq.DEALER, endpoint, MAX_SERVER_FRAME_BYTES)
        self._messages = LoopSocket(self._socket)
        self._decoder: Decoder[ServerMessage] = Decoder(ServerMessage)  # type: ignore[arg-type]
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        # Only the learner pings, and the server answers. A socket that pings aborts its process when a peer
        # fills the queue and hangs up (libzmq 4.3.5: assertion !_io_error in the ping's timer). The server
        # therefore never pings. The learner's queue is unbounded, because it holds only what the learner has
        # requested.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        # Neither a pong nor the next ping has a timeout: both queue behind a long frame. Both sides watch the
        # bytes instead.
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_TTL, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        if keys is not None:
            self._socket.curve_secretkey, self._socket.curve_publickey = keys.secret, keys.public
            self._socket.curve_serverkey = keys.server
        self._monitor = Monitor(self._context, self._socket)
        self._connections = Connections(self._is_ours, DEAD_PEER_TIMEOUT_MS)
        self._socket.connect(endpoint)

    def _is_ours(self, connection: socket.socket) -> bool:
        """Return whether the socket is a TCP connection.

        ZeroMQ names the descriptors. The port would not identify them, because other connections of this
        process may lead to the same port.
        """
        return address_of(connection.getpeername()) is not None

    async def send(self, message: Message, timeout_s: float) -> None:
        """Send a message over a live connection.

        Raises:
            DeadlineExceeded: The channel is closed, or no connection accepts the message within `timeout_s`.
        """
        try:
            # Not wait_for, which in Python 3.11 swallows a cancellation that arrives as the send completes.
            async with asyncio.timeout(timeout_s):
                await self._messages.send(encode(message))
        except SocketClosed as error:
            raise DeadlineExceeded(
                f"{type(message).__name__} was not sent: the channel to {self.endpoint} is closed"
            ) from error
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{type(message).__name__} could not be sent to {self.endpoint} within {timeout_s} s: "
                "the server is not connected or not reading."
            ) from error

    async def receive(self) -> ServerMessage:
        """Return the server's next message.

        Raises:
            ProtocolError: The frames are not a valid message.
        """
        return self._decoder.decode(await self._messages.receive())

    def poll_connection(self) -> bool:
        """Close the connection if the server is silent, so that ZeroMQ restores it.

        Return whether part of a long message has arrived since the last check.
        """
        self._monitor.read()
        return self._connections.check(self._monitor.descriptors) > MAX_PONG_BYTES

    def check_handshake(self) -> bool:
        """Return whether a handshake has failed since the last call, but may yet succeed.

        The server may be starting.

        Raises:
            HandshakeRefused: ZeroMQ does not retry after such a failure.
        """
        failures = self._monitor.pop_failures()
        if Failure.UNKNOWN_KEY in failures:
            raise HandshakeRefused(
                f"the server at {self.endpoint} does not know this learner's key; copy its public key "
                "(`allowed/learner.pub` in the directory where the key was created) into `allowed/` in the server's "
                "key directory, and restart this learner"
            )
        if Failure.OTHER_MECHANISM in failures:
            difference = "has no keys, but this learner has" if self._has_keys else "requires keys"
            raise HandshakeRefused(
                f"the server at {self.endpoint} {difference}; set the same `keys` on both sides, or on neither"
            )
        return bool(failures)

    @property
    def is_up(self) -> bool:
        """True if a connection exists, as of the last check."""
        return bool(self._monitor.descriptors)

    @property
    def num_broken(self) -> int:
        """Number of broken connections, as of the last check of connection or handshake."""
        return self._monitor.num_broken

    def close(self) -> None:
        if self._socket.closed:
            return
        self._messages.close()
        self._monitor.close()
        self._context.term()
