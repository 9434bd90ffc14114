"""A process that tries to connect or to flood: `python -m tests.protocol.intruder KIND ENDPOINT SECONDS [KEYS] [SIZE]`.

Opens NUM_CONNECTIONS at once, sends Hellos (or, to flood, rubbish of SIZE bytes) as fast as it can, and prints how many
messages left, how many answers came, and how many connections ended. `raw` speaks no ZeroMQ.
"""

import contextlib
import json
import socket
import sys
import time

import zmq

from protocol.channel.keys import LearnerKeys, learner_keys
from protocol.codec import encode
from protocol.messages import PROTOCOL_VERSION, Hello
from tests.fingerprint import MODEL

NUM_CONNECTIONS = 50


def main() -> None:
    kind, endpoint, seconds, *rest = sys.argv[1:]
    give_up_at = time.monotonic() + float(seconds)
    if kind == "raw":
        counts = shout(endpoint, give_up_at)
    elif kind == "flood":
        counts = knock(endpoint, give_up_at, None, [b"\xc1" * int(rest[0])], num_connections=1)
    else:
        hello = encode(Hello(run=kind, protocol_version=PROTOCOL_VERSION, model=MODEL, learner=kind))
        padded = [*map(bytes, hello), b"x" * 100_000]
        counts = knock(endpoint, give_up_at, learner_keys(rest[0]) if kind == "keys" else None, padded, NUM_CONNECTIONS)
    print(json.dumps(counts))


def knock(
    endpoint: str, give_up_at: float, keys: LearnerKeys | None, frames: list[bytes], num_connections: int
) -> dict[str, int]:
    """Send over ZeroMQ with or without keys."""
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


def shout(endpoint: str, give_up_at: float) -> dict[str, int]:
    """Connect repeatedly, send bytes that are not ZeroMQ, and wait for the server's reaction."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    counts = {"sent": 0, "answers": 0, "ended": 0}
    while time.monotonic() < give_up_at:
        with (
            socket.create_connection((host, int(port)), timeout=30) as connection,
            contextlib.suppress(ConnectionError),
        ):
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
            counts["sent"] += 1
            while connection.recv(4096):
                pass  # the greeting that every ZeroMQ socket sends first
        counts["ended"] += 1
    return counts


if __name__ == "__main__":
    main()
