"""A process that tries to get in or to flood: `python -m tests.protocol.intruder KIND ENDPOINT SECONDS [KEYS] [SIZE]`.

Opens NUM_CONNECTIONS at once, sends Hellos (or, to flood, rubbish of SIZE bytes) as fast as it can, and prints how many
messages left, how many answers came, and how many connections ended. `malformed` sends SIZE messages of malformed.py, a
few on each connection, for after the first that is malformed it is ignored; `oversized` announces frames without sending them.
"""

import contextlib
import itertools
import json
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from protocol.channel.keys import LearnerKeys, learner_keys
from protocol.codec import encode
from protocol.messages import PROTOCOL_VERSION, Hello
from tests.fingerprint import MODEL
from tests.malformed import TO_SERVER, without_end

NUM_CONNECTIONS = 50
MESSAGES_PER_CONNECTION = 4
NUM_BATCHES_OPEN = 4
FRAME_OF_A_GIBIBYTE = b"\x02" + (1 << 30).to_bytes(8, "big")  # of ZMTP: a long frame
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(1) + bytes(31)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def main() -> None:
    kind, endpoint, seconds, *rest = sys.argv[1:]
    give_up_at = time.monotonic() + float(seconds)
    if kind == "raw":
        counts = call(endpoint, give_up_at, shout)
    elif kind == "malformed":
        counts = pester(endpoint, give_up_at, int(rest[0]))
    elif kind == "oversized":
        counts = call(endpoint, give_up_at, announce)
    elif kind == "flood":
        counts = knock(endpoint, give_up_at, None, [b"\xc1" * int(rest[0])], num_connections=1)
    else:
        hello = [
            bytes(frame)
            for frame in encode(Hello(run=kind, protocol_version=PROTOCOL_VERSION, model=MODEL, learner=kind))
        ]
        padded = [*hello, b"x" * 100_000]
        counts = knock(endpoint, give_up_at, learner_keys(rest[0]) if kind == "keys" else None, padded, NUM_CONNECTIONS)
    print(json.dumps(counts))


def knock(
    endpoint: str, give_up_at: float, keys: LearnerKeys | None, frames: list[bytes], num_connections: int
) -> dict[str, int]:
    """Send over ZeroMQ, with keys or without."""
    context = zmq.Context()
    knocking, monitors = [], []
    for _ in range(num_connections):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, 10)
        if keys is not None:
            dealer.curve_secretkey, dealer.curve_publickey = keys.secret, keys.public
            dealer.curve_serverkey = keys.server
        monitors.append(dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        dealer.connect(endpoint)
        knocking.append(dealer)
    counts = {"sent": 0, "answers": 0, "ended": 0}
    while time.monotonic() < give_up_at:
        for dealer, monitor in zip(knocking, monitors, strict=True):
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart(frames, flags=zmq.NOBLOCK)
                counts["sent"] += 1
            while dealer.poll(0):
                dealer.recv_multipart()
                counts["answers"] += 1
            while monitor.poll(0):
                monitor.recv_multipart()
                counts["ended"] += 1
    context.destroy(linger=0)
    return counts


def pester(endpoint: str, give_up_at: float, num_messages: int) -> dict[str, int]:
    """Send malformed messages, a few on each connection; then a Hello, whose answer says that the server has come so far."""
    context = zmq.Context()
    counts = {"sent": 0, "answers": 0, "ended": 0}
    messages = itertools.islice(without_end(TO_SERVER, seed=0), num_messages)
    open_batches: deque[list[zmq.Socket[Any]]] = deque()
    while batch := list(itertools.islice(messages, NUM_CONNECTIONS * MESSAGES_PER_CONNECTION)):
        dealers = [open_dealer(context, endpoint) for _ in range(0, len(batch), MESSAGES_PER_CONNECTION)]
        for frames, dealer in zip(batch, itertools.cycle(dealers), strict=False):
            dealer.send_multipart(frames)
        dealers.append(open_dealer(context, endpoint))
        dealers[-1].send_multipart(encode(TO_SERVER[0]))
        assert dealers[-1].poll(1000 * (give_up_at - time.monotonic())), f"no answer in time, after {counts}"
        counts["sent"] += len(batch) + 1
        counts["answers"] += 1
        # Not those of the last batches: the server forgets unread messages of a connection that has ended.
        open_batches.append(dealers)
        for dealer in open_batches.popleft() if len(open_batches) > NUM_BATCHES_OPEN else ():
            dealer.close()
            counts["ended"] += 1
    context.destroy()
    return counts


def open_dealer(context: zmq.Context[Any], endpoint: str) -> zmq.Socket[Any]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 10_000)
    dealer.connect(endpoint)
    return dealer


def call(endpoint: str, give_up_at: float, say: Callable[[socket.socket], None]) -> dict[str, int]:
    """Connect again and again, say something, and wait for what the server does."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    counts = {"sent": 0, "answers": 0, "ended": 0}
    while time.monotonic() < give_up_at:
        with (
            socket.create_connection((host, int(port)), timeout=30) as connection,
            contextlib.suppress(ConnectionError),
        ):
            say(connection)
            counts["sent"] += 1
            while connection.recv(4096):
                pass  # the greeting that every ZeroMQ socket sends first
        counts["ended"] += 1
    return counts


def announce(connection: socket.socket) -> None:
    """Say that a frame of a gibibyte follows."""
    connection.sendall(GREETING + READY)
    heard = b""
    while b"READY" not in heard:
        heard += connection.recv(4096)
    connection.sendall(FRAME_OF_A_GIBIBYTE)


def shout(connection: socket.socket) -> None:
    """Send what is not ZeroMQ at all."""
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)


if __name__ == "__main__":
    main()
