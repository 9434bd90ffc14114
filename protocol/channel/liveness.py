"""The TCP connections of one socket of ZeroMQ, as the kernel knows them: what ZeroMQ has no call for.

ZeroMQ hands over whole messages and keeps the frames of one until its last has come, however many they are. The kernel's
count of the bytes that each connection has brought shows a message that does not end.

For ZeroMQ a peer is alive when a whole frame has come, so a long one on a slow link looks like silence to it; and it forgets
that it waits for a ping as soon as any other message comes (libzmq 4.3.5: heartbeat_ttl), so a peer that is stopped after one
would count as alive for ever. The kernel also knows when a connection has last brought a byte.

`Monitor` reads what libzmq reports about a socket: why handshakes fail, which connections are up, and when they break.
"""

import logging
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger(__name__)
MAX_UNFINISHED_BYTES = 128 << 20
"""Four of the longest frames. More without one whole message, from one look to the next but one, is a message without end."""
MIN_SILENT_LOOKS = 3
"""However long it was silent: whoever looks may itself have been stopped meanwhile, and the peer with it."""
TCP_INFO_SIZE = 256
TCPI_LAST_DATA_RECV_MS = 52
TCPI_BYTES_RECEIVED = 128
"""Where these are in Linux's struct tcp_info."""


def address_of(name: object) -> tuple[str, int] | None:
    """Return host and port out of what `getsockname` and `getpeername` give; None for what is no TCP connection.

    An IPv4 peer of a socket that listens for both kinds has its address in IPv6's form.
    """
    match name:
        case (str(host), int(port), *_):
            return host.removeprefix("::ffff:"), port
    return None


def _socket_of(descriptor: int) -> socket.socket:
    """Return a socket of our own. As IPv6, because Python makes room for no more than an address of the family it is told."""
    return socket.fromfd(descriptor, socket.AF_INET6, socket.SOCK_STREAM)


class _Heard(msgspec.Struct, frozen=True):
    """Of one connection, as of a look."""

    num_bytes: int
    """That it had brought by then."""
    mark: int
    """That it had brought when its last whole message was seen."""
    num_silent_looks: int


class Connections:
    """Ends connections of one kind, by the descriptors of their sockets in this process. All our peers ping."""

    def __init__(
        self, is_one: Callable[[socket.socket], bool], dead_after_ms: int, max_unfinished_bytes: float
    ) -> None:
        """`is_one` tells whether a socket is such a connection: a descriptor may be another file's by now."""
        self._is_one, self._dead_after_ms, self._max_unfinished_bytes = is_one, dead_after_ms, max_unfinished_bytes
        self._finished: set[int] = set()
        """Descriptors that have brought a whole message since the last look."""
        self._heard: dict[int, _Heard] = {}

    def finished_message(self, descriptor: int) -> None:
        self._finished.add(descriptor)

    def look(self, descriptors: Iterable[int]) -> int:
        """End those of these connections that go on and on without a whole message, and those of silent peers.

        Returns how many bytes have come since the last look over the connection that brought most.
        """
        most, heard = 0, {}
        for descriptor, num_bytes, silence_ms in self._counters(descriptors):
            before = self._heard.get(descriptor)
            if before is None or num_bytes < before.num_bytes:  # less: the descriptor is another connection's now
                before = _Heard(num_bytes, num_bytes, 0)
            is_silent = num_bytes == before.num_bytes
            now = _Heard(
                num_bytes=num_bytes,
                mark=num_bytes if descriptor in self._finished else before.mark,
                num_silent_looks=before.num_silent_looks + 1 if is_silent else 0,
            )
            heard[descriptor] = now
            most = max(most, num_bytes - before.num_bytes)
            if num_bytes - now.mark > self._max_unfinished_bytes:
                self.end(descriptor, f"{(num_bytes - now.mark) >> 20} MiB of a message that does not end")
            elif silence_ms > self._dead_after_ms and now.num_silent_looks >= MIN_SILENT_LOOKS:
                self.end(descriptor, f"nothing was heard of it for {silence_ms / 1000:.1f} s")
        self._heard = heard
        self._finished.clear()
        return most

    def end(self, descriptor: int, reason: str) -> None:
        """Shut the TCP socket down, if it is still one of these."""
        try:
            with _socket_of(descriptor) as connection:
                if self._is_one(connection):
                    log.warning("a peer at %s is cut off: %s", connection.getpeername()[0], reason)
                    # Reset once ZeroMQ closes it: after a mere FIN a peer that goes on sending would hang for a minute.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("a peer to cut off is gone already: %s", error)

    def _counters(self, descriptors: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """Descriptor, bytes received and milliseconds of silence of each connection."""
        for descriptor in descriptors:
            try:
                with _socket_of(descriptor) as connection:
                    if self._is_one(connection):
                        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_SIZE)
                        (num_bytes,) = struct.unpack_from("=Q", info, TCPI_BYTES_RECEIVED)
                        (silence_ms,) = struct.unpack_from("=I", info, TCPI_LAST_DATA_RECV_MS)
                        yield descriptor, num_bytes, silence_ms
            except OSError:
                continue  # closed meanwhile


class Failure(Enum):
    """What went wrong in a handshake, as far as this side can know."""

    UNKNOWN_KEY = "a key that is not in the server's allowed/"
    OTHER_MECHANISM = "keys on one side only"
    OTHER_SERVER_KEY = "a server.pub that is another server's"
    BROKEN_OFF = "broken off"


_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Monitor:
    """What happens to the connections of one socket from now on; `take` returns the handshakes that have newly failed."""

    def __init__(self, context: zmq.Context[Any], watched: zmq.Socket[Any]) -> None:
        address = f"inproc://monitor-{id(watched)}"
        watched.monitor(address, _HANDSHAKES | zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._events = context.socket(zmq.PAIR)
        # Without a limit: at one, libzmq's own thread would wait for the reader, and with it every connection.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(address)
        self._failures: list[Failure] = []
        self.num_broken = 0
        """Connections that were up and have ended, as of the last `read`."""
        self.descriptors: set[int] = set()
        """Of the connections that are up, as of the last `read`. ZeroMQ may have closed one since."""

    def read(self) -> None:
        """Take note of what has happened since."""
        while self._events.poll(0):
            event = parse_monitor_message(self._events.recv_multipart())
            match event["event"]:
                case zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED:
                    self.descriptors.add(event["value"])
                case zmq.EVENT_DISCONNECTED:
                    self.num_broken += 1
                    self.descriptors.discard(event["value"])
                case failed:
                    self._failures.append(_failure(failed, event["value"]))

    def take(self) -> list[Failure]:
        self.read()
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Call it after the watched socket is closed, which ends the monitoring: an event without a reader would wait."""
        self._events.close(linger=0)


def _failure(event: int, value: int) -> Failure:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Failure.UNKNOWN_KEY
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return Failure.OTHER_SERVER_KEY
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return Failure.OTHER_MECHANISM
    return Failure.BROKEN_OFF
