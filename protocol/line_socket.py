"""JSON lines over TCP, and keepalive probes that end a connection whose host falls silent."""

import socket
from collections.abc import Mapping
from contextlib import suppress

import msgspec

KEEPALIVE = {socket.TCP_KEEPIDLE: 2, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""Keepalive settings. A silent host counts as lost after 8 s."""


def keep_alive(connection: socket.socket, options: Mapping[int, int] = KEEPALIVE) -> None:
    """Let the kernel probe the peer while the connection is idle."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def send_line(connection: socket.socket, line: msgspec.Struct) -> None:
    """Send a line, or nothing if the peer has ended."""
    with suppress(OSError):
        connection.sendall(msgspec.json.encode(line) + b"\n")
