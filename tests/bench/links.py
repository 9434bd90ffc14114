"""Measure the cost of polling many connections, in a learner and a server: `python -m tests.bench.links [--json]`.

    N servers with the scripted engine, in another process ◀── N links in one event loop: Hello, pulses, polls
    one server ◀── N connections

Results are shares of one core: `look_frac` and `server_look_frac` for two polls per second of each connection,
`links_frac` for all work of the links, including pulses.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, closing
from typing import Any

from inference_server.config import ServerConfig
from learner.servers.link import ServerLink
from protocol.channel.sockets import LearnerChannel, ServerChannel
from protocol.messages import PROTOCOL_VERSION, Ack, Hello
from tests.bench.machine import machine
from tests.bench.push import as_text
from tests.fingerprint import MODEL

LOOKS_PER_S = 2.0
CONNECT_TIMEOUT_S = 120.0


class Spent:
    """CPU time of this thread in calls of one function."""

    def __init__(self) -> None:
        self.seconds, self.num_calls = 0.0, 0

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.thread_time() - started
                self.num_calls += 1

        return counted


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.links", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--links", type=int, nargs="+", default=[8, 64, 128])
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of the measurement")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    links = {str(number): asyncio.run(measure(number, options.seconds)) for number in options.links}
    result = {"machine": machine(), "looks_per_s": LOOKS_PER_S, "links": links}
    print(json.dumps(result) if options.json else as_text(result))


async def serve(num_servers: int) -> None:
    """Run the servers until standard input ends."""
    from tests.fakes import ScriptedEngine, serving

    async with AsyncExitStack() as servers:
        config = ServerConfig()
        endpoints = [
            (await servers.enter_async_context(serving(ScriptedEngine(), config))).endpoint for _ in range(num_servers)
        ]
        print(json.dumps(endpoints), flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def measure(num_links: int, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", __spec__.name, "--serve", str(num_links)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    try:
        endpoints = json.loads(await process.stdout.readline())
        of_links = await looks_of_links(endpoints, seconds)
    finally:
        process.stdin.close()
        await process.wait()
    return of_links | {"server_look_frac": await looks_of_a_server(num_links)}


async def looks_of_links(endpoints: list[str], seconds: float) -> dict[str, float]:
    hello = Hello(run="bench", protocol_version=PROTOCOL_VERSION, model=MODEL)
    with ExitStack() as stack:
        links = [stack.enter_context(closing(ServerLink(endpoint, hello))) for endpoint in endpoints]
        running = [asyncio.create_task(link.run()) for link in links]
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            while not all(link.connected for link in links):
                await asyncio.sleep(0.05)
        look, spent = LearnerChannel.poll_connection, Spent()
        LearnerChannel.poll_connection = spent.counting(look)  # type: ignore[method-assign]
        began, thread_began = time.monotonic(), time.thread_time()
        await asyncio.sleep(seconds)
        took_s, thread_s = time.monotonic() - began, time.thread_time() - thread_began
        LearnerChannel.poll_connection = look  # type: ignore[method-assign]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    look_s = spent.seconds / spent.num_calls
    return {
        "look_us": 1e6 * look_s,
        "look_frac": LOOKS_PER_S * len(endpoints) * look_s,
        "links_frac": thread_s / took_s,
    }


async def looks_of_a_server(num_connections: int) -> float:
    """Return the share of a core at two polls per second."""
    with ExitStack() as stack:
        server = stack.enter_context(closing(ServerChannel("tcp://127.0.0.1:*")))
        for _ in range(num_connections):
            learner = stack.enter_context(closing(LearnerChannel(server.endpoint)))
            await learner.send(Ack(group_ids=[]), CONNECT_TIMEOUT_S)
            await server.receive()
        server.poll_connections()
        started, num_looks = time.thread_time(), 20
        for _ in range(num_looks):
            server.poll_connections()
        return LOOKS_PER_S * (time.thread_time() - started) / num_looks


if __name__ == "__main__":
    main()
