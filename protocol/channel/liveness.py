"""TCP connections of one ZeroMQ socket, observed through the kernel.

ZeroMQ delivers whole messages, and keeps all frames of a message until the last one arrives. The kernel's
count of received bytes reveals a message that never ends.

For ZeroMQ, a peer is alive once a whole frame has arrived, so a long frame on a slow link appears as silence.
Any other message also cancels its wait for a ping (libzmq 4.3.5: heartbeat_ttl), so a peer that stops after
it counts as alive forever. The kernel also knows when a connection last received a byte.

`Monitor` reads libzmq's events of a socket: failed handshakes, and connections that open or break.
"""

import logging
import math
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

log = logging.getLogger(__name__)
MIN_SILENT_CHECKS = 3
"""Minimum number of checks in a row without a byte, however long the silence. The checking process itself,
and the peer with it, may have been suspended."""
TCP_INFO_SIZE = 256
TCPI_LAST_DATA_RECV_MS = 52
TCPI_BYTES_RECEIVED = 128
"""Byte offsets in Linux's struct tcp_info."""


def address_of(name: object) -> tuple[str, int] | None:
    """Return host and port from a result of `getsockname` or `getpeername`.

    Return None for anything but a TCP connection. A dual-stack socket reports an IPv4 peer in IPv6 form,
    which is converted back.
    """
    match name:
        case (str(host), int(port), *_):
            return host.removeprefix("::ffff:"), port
    return None


def _socket_of(descriptor: int) -> socket.socket:
    """Return a socket object of our own for a descriptor.

    It is an IPv6 one, because Python reserves room only for addresses of the given family.
    """
    return socket.fromfd(descriptor, socket.AF_INET6, socket.SOCK_STREAM)


class _Counters(msgspec.Struct, frozen=True):
    """Counters of one connection as of a check."""

    num_bytes: int
    """Number of bytes received by then."""
    mark: int
    """Number of bytes received when the last whole message was noticed."""
    num_silent_checks: int


class Connections:
    """Watchdog that closes connections that are silent or send an endless message.

    It identifies connections by descriptor. Every live peer sends pings or pongs.
    """

    def __init__(
        self,
        is_ours: Callable[[socket.socket], bool],
        dead_after_ms: int,
        max_unfinished_bytes: Callable[[int], float] = lambda _: math.inf,
    ) -> None:
        """Create a watchdog.

        Args:
            is_ours: Checks a socket, because its descriptor may be reused.
            max_unfinished_bytes: Returns how many bytes a descriptor may receive without a whole message. They count
                from the check after the last whole message.
        """
        self._is_ours, self._dead_after_ms, self._max_unfinished_bytes = is_ours, dead_after_ms, max_unfinished_bytes
        self._finished: set[int] = set()
        """Descriptors that have received a whole message since the last check."""
        self._counters_of: dict[int, _Counters] = {}

    def finished_message(self, descriptor: int) -> None:
        self._finished.add(descriptor)

    def check(self, descriptors: Iterable[int]) -> int:
        """Close the connections of silent peers, and those with an endless message.

        Return the bytes that arrived since the last check over the busiest connection.
        """
        most, counters = 0, {}
        for descriptor, num_bytes, silence_ms in self._read_counters(descriptors):
            before = self._counters_of.get(descriptor)
            if before is None or num_bytes < before.num_bytes:  # fewer bytes: the descriptor was reused
                before = _Counters(num_bytes, num_bytes, 0)
            is_silent = num_bytes == before.num_bytes
            now = _Counters(
                num_bytes=num_bytes,
                mark=num_bytes if descriptor in self._finished else before.mark,
                num_silent_checks=before.num_silent_checks + 1 if is_silent else 0,
            )
            counters[descriptor] = now
            most = max(most, num_bytes - before.num_bytes)
            if num_bytes - now.mark > self._max_unfinished_bytes(descriptor):
                self.disconnect(descriptor, f"received {(num_bytes - now.mark) >> 20} MiB of an unfinished message")
            elif silence_ms > self._dead_after_ms and now.num_silent_checks >= MIN_SILENT_CHECKS:
                self.disconnect(descriptor, f"received nothing for {silence_ms / 1000:.1f} s")
        self._counters_of = counters
        self._finished.clear()
        return most

    def disconnect(self, descriptor: int, reason: str) -> None:
        """Shut the TCP socket down, if it is still such a connection."""
        try:
            with _socket_of(descriptor) as connection:
                if self._is_ours(connection):
                    log.warning("disconnecting the peer at %s: %s", connection.getpeername()[0], reason)
                    # Makes ZeroMQ's close send a reset. After a mere FIN, a peer that keeps sending would
                    # hang for a minute.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("a peer to disconnect is already gone: %s", error)

    def _read_counters(self, descriptors: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """Yield descriptor, bytes received and milliseconds of silence per connection."""
        for descriptor in descriptors:
            try:
                with _socket_of(descriptor) as connection:
                    if self._is_ours(connection):
                        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_SIZE)
                        (num_bytes,) = struct.unpack_from("=Q", info, TCPI_BYTES_RECEIVED)
                        (silence_ms,) = struct.unpack_from("=I", info, TCPI_LAST_DATA_RECV_MS)
                        yield descriptor, num_bytes, silence_ms
            except OSError:
                continue  # closed in the meantime


class Failure(Enum):
    """Reason for a failed handshake, as far as this side can know."""

    UNKNOWN_KEY = "a key that is not in the server's allowed/"
    OTHER_MECHANISM = "keys on one side only"
    OTHER_SERVER_KEY = "a server.pub of another server"
    BROKEN_OFF = "broken off"


_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Monitor:
    """Events of one socket's connections since the monitor was created.

    `pop_failures` returns the handshakes that have failed since its last call.
    """

    def __init__(self, context: zmq.Context[Any], watched: zmq.Socket[Any]) -> None:
        address = f"inproc://monitor-{id(watched)}"
        watched.monitor(address, _HANDSHAKES | zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._events = context.socket(zmq.PAIR)
        # No limit: at a limit, libzmq's own thread would wait for the reader, and every connection with it.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(address)
        self._failures: list[Failure] = []
        self.num_broken = 0
        """Number of connections that were up and are now closed, as of the last `read`."""
        self.descriptors: set[int] = set()
        """Descriptors of the connections that are up, as of the last `read`. ZeroMQ may have closed one
        since."""

    def read(self) -> None:
        """Process the events since the last call."""
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

    def pop_failures(self) -> list[Failure]:
        self.read()
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """Close the monitor, after the watched socket.

        Closing that socket stops the monitoring. Before that, libzmq would wait on an event without a reader.
        """
        self._events.close(linger=0)


def _failure(event: int, value: int) -> Failure:
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return Failure.UNKNOWN_KEY
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return Failure.OTHER_SERVER_KEY
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return Failure.OTHER_MECHANISM
    return Failure.BROKEN_OFF
