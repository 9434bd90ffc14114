"""Compare the typed channel with bare pyzmq, for groups of completions from server to learner.

    LearnerChannel or DEALER ── count ──▶ server process: ServerChannel or ROUTER ── messages ──▶ this process

The bare side sends the same frames over the same kind of sockets, with blocking calls and without event loop, types and
limits. It creates its frames once in advance; the channel encodes and decodes each message.
"""

import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import zmq

from protocol.channel.keys import learner_keys, make_keys, server_keys
from protocol.channel.sockets import LearnerChannel, ServerChannel
from protocol.codec import encode
from protocol.hardware import bind_cores
from protocol.messages import Ack, Completion, Group

NUM_COMPLETIONS = 8
SIZES = {"small": (32, 900), "large": (4096, 200)}
"""Tokens per completion, and messages per turn: fewer than the high-water mark, so that none is dropped."""
ROUNDS = 2
"""Rounds of each turn. Only the last round is timed, on a warm connection."""
TIMEOUT_S = 60.0
SERVER_CORES, LEARNER_CORES = (0,), (1,)


Side = Literal["channel", "bare"]


class Order(NamedTuple):
    """One turn of the sending process. `keys`: a directory of keys."""

    side: Side
    num_tokens: int
    num_messages: int
    keys: str | None


def group(num_tokens: int) -> Group:
    """Return a group as a server sends it for one prompt."""
    rng = np.random.default_rng(num_tokens)
    completions = [
        Completion(
            token_ids=rng.integers(0, 150_000, num_tokens, dtype=np.int32),
            behavior_logprobs=-rng.random(num_tokens, dtype=np.float32),
            versions=[(3, num_tokens)],
            finish_reason="stop",
        )
        for _ in range(NUM_COMPLETIONS)
    ]
    return Group(group_id="12-0", entered_version=3, completions=completions, server_s=1.5)


def serve(pipe: Connection) -> None:
    """Run the sending process, with a new socket for each order."""
    bind_cores(SERVER_CORES)
    order: Order | None
    while (order := pipe.recv()) is not None:
        if order.side == "channel":
            asyncio.run(send_typed(pipe, order))
        else:
            send_bare(pipe, order)


async def send_typed(pipe: Connection, order: Order) -> None:
    channel = ServerChannel("tcp://127.0.0.1:*", server_keys(order.keys) if order.keys else None)
    message = group(order.num_tokens)
    pipe.send(channel.endpoint)
    for _ in range(ROUNDS):
        peer, _asked = await channel.receive()
        for _ in range(order.num_messages):
            assert await channel.send(peer, message)
    await channel.receive()
    channel.close()


def send_bare(pipe: Connection, order: Order) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        if order.keys:
            keys = server_keys(order.keys)
            router.curve_secretkey, router.curve_publickey, router.curve_server = keys.secret, keys.public, True
        router.bind("tcp://127.0.0.1:*")
        frames = encode(group(order.num_tokens))
        pipe.send(router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        for _ in range(ROUNDS):
            peer, _asked = router.recv_multipart()
            for _ in range(order.num_messages):
                router.send_multipart([peer, *frames])
        router.recv_multipart()


async def receive_typed(endpoint: str, order: Order) -> tuple[float, Group]:
    """Return the seconds of the last round and the last message."""
    channel = LearnerChannel(endpoint, learner_keys(order.keys) if order.keys else None)
    for _ in range(ROUNDS):
        began_at = time.perf_counter()
        await channel.send(Ack(group_ids=[]), TIMEOUT_S)
        for _ in range(order.num_messages):
            message = await channel.receive()
        seconds = time.perf_counter() - began_at
    await channel.send(Ack(group_ids=[]), TIMEOUT_S)
    channel.close()
    return seconds, message


def receive_bare(endpoint: str, order: Order) -> tuple[float, list[bytes]]:
    """Return the seconds of the last round and the frames of the last message."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        if order.keys:
            keys = learner_keys(order.keys)
            dealer.curve_secretkey, dealer.curve_publickey, dealer.curve_serverkey = (
                keys.secret,
                keys.public,
                keys.server,
            )
        dealer.connect(endpoint)
        for _ in range(ROUNDS):
            began_at = time.perf_counter()
            dealer.send(b"")
            for _ in range(order.num_messages):
                frames = dealer.recv_multipart()
            seconds = time.perf_counter() - began_at
        dealer.send(b"")
        return seconds, frames


class Sender:
    """The sending process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def turn(self, order: Order) -> float:
        """Return messages per second of one turn. Raises AssertionError if messages differ, TimeoutError."""
        self._pipe.send(order)
        if not self._pipe.poll(TIMEOUT_S):
            raise TimeoutError(f"the sending process did not answer within {TIMEOUT_S:g} s")
        endpoint = self._pipe.recv()
        if order.side == "channel":
            seconds, message = asyncio.run(receive_typed(endpoint, order))
            frames = encode(message)
        else:
            seconds, frames = receive_bare(endpoint, order)
        sent = encode(group(order.num_tokens))
        assert [bytes(frame) for frame in frames] == [bytes(frame) for frame in sent], (
            "the received message is not what was sent"
        )
        return order.num_messages / seconds

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(TIMEOUT_S)


def measure(repetitions: int, sizes: dict[str, tuple[int, int]] = SIZES) -> dict[str, Any]:
    """Return the results of each size, with and without keys."""
    sender = Sender()
    cores = os.sched_getaffinity(0)
    bind_cores(LEARNER_CORES)
    try:
        with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as directory:
            make_keys(Path(directory) / "keys")
            return {
                f"{size} {mechanism}": compare(turns(sender, num_tokens, num_messages, keys, repetitions), num_tokens)
                for size, (num_tokens, num_messages) in sizes.items()
                for mechanism, keys in (("plain", None), ("with keys", f"{directory}/keys"))
            }
    finally:
        os.sched_setaffinity(0, cores)
        sender.close()


def turns(
    sender: Sender, num_tokens: int, num_messages: int, keys: str | None, repetitions: int
) -> dict[Side, list[float]]:
    """Return messages per second of the channel and of bare pyzmq, in turns, each first in every other turn."""
    rates: dict[Side, list[float]] = {"channel": [], "bare": []}
    for repetition in range(repetitions):
        for side in list(rates) if repetition % 2 else list(rates)[::-1]:
            rates[side].append(sender.turn(Order(side, num_tokens, num_messages, keys)))
    return rates


def compare(rates: dict[Side, list[float]], num_tokens: int) -> dict[str, Any]:
    """Return medians over repetitions."""
    num_bytes = sum(len(frame) for frame in encode(group(num_tokens)))
    medians = {side: statistics.median(of_side) for side, of_side in rates.items()}
    return {
        "over_pyzmq": medians["channel"] / medians["bare"],
        "message_bytes": num_bytes,
        "messages_per_s": medians,
        "bytes_per_s": {side: rate * num_bytes for side, rate in medians.items()},
        "messages_per_s_by_repetition": rates,
    }
