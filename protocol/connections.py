"""The TCP connections of one listening port, as the kernel knows them: what ZeroMQ has no call for.

ZeroMQ hands over whole messages and keeps the frames of one until its last has come, however many they are. The kernel's
count of the bytes that each connection has brought shows a message that does not end.

ZeroMQ forgets that it waits for a peer's next ping as soon as any other message comes (libzmq 4.3.5: heartbeat_ttl). A peer
that is stopped after one would count as alive for ever; the kernel also knows when a connection was last heard.
"""

import logging
import os
import socket
import struct
from collections.abc import Iterator

log = logging.getLogger(__name__)

MAX_UNFINISHED_BYTES = 128 << 20
"""Four of the longest frames. More without one whole message, from one look to the next but one, ends the connection."""
TCP_INFO_SIZE = 256
TCPI_LAST_DATA_RECV_MS = 52
TCPI_BYTES_RECEIVED = 128
"""Where these are in Linux's struct tcp_info."""


class Connections:
    """Ends connections by the descriptors of their sockets in this process."""

    def __init__(self, port: int, dead_after_ms: int) -> None:
        self._port, self._dead_after_ms = port, dead_after_ms
        self._finished: set[int] = set()
        """Descriptors that have brought a whole message since the last look."""
        self._marks: dict[int, int] = {}
        """Bytes that a connection had brought when its last whole message was seen."""

    def finished_message(self, descriptor: int) -> None:
        self._finished.add(descriptor)

    def look(self) -> None:
        """End the connections that go on and on without a whole message, and those of silent peers: all of ours ping."""
        marks = {}
        for descriptor, num_bytes, silence_ms in self._counters():
            mark = self._marks.get(descriptor, num_bytes)
            if descriptor in self._finished or num_bytes < mark:  # less: the descriptor is another connection's now
                mark = num_bytes
            marks[descriptor] = mark
            if num_bytes - mark > MAX_UNFINISHED_BYTES:
                self.end(descriptor, f"{(num_bytes - mark) >> 20} MiB of a message that does not end")
            elif silence_ms > self._dead_after_ms:
                self.end(descriptor, f"nothing was heard of it for {silence_ms / 1000:.1f} s")
        self._marks = marks
        self._finished.clear()

    def end(self, descriptor: int, reason: str) -> None:
        """Shut the TCP socket down, if it is still one of this port: its number may be another file's by now."""
        try:
            with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as connection:
                if connection.getsockname()[1:] == (self._port,):
                    log.warning("a peer at %s is cut off: %s", connection.getpeername()[0], reason)
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("a peer to cut off is gone already: %s", error)

    def _counters(self) -> Iterator[tuple[int, int, int]]:
        """Descriptor, bytes received and milliseconds of silence of each connection."""
        for name in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM) as connection:
                    if connection.getsockname()[1:] == (self._port,):
                        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_SIZE)
                        (num_bytes,) = struct.unpack_from("=Q", info, TCPI_BYTES_RECEIVED)
                        (silence_ms,) = struct.unpack_from("=I", info, TCPI_LAST_DATA_RECV_MS)
                        yield int(name), num_bytes, silence_ms
            except OSError:
                continue  # closed meanwhile
