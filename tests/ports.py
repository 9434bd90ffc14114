"""Free ports for servers that a test starts, each handed out once.

The ports are below those that the kernel assigns to connections. A server binds its port only after its engine has
started, up to a minute later on a loaded machine; by then a port chosen by the kernel could belong to another test's
connection. For the same reason every worker of a test run has its own range, independent of any random seed.
"""

import itertools
import os
import random
import socket
from contextlib import suppress

NUM_WORKERS = 8
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % NUM_WORKERS
_OWN_PORTS = range(10_000 + _WORKER, 32_000, NUM_WORKERS)
# Concurrent test runs start at different offsets.
_NUMBERS = itertools.count(random.SystemRandom().randrange(len(_OWN_PORTS)))


def free_port() -> int:
    for number in _NUMBERS:
        with suppress(OSError), socket.create_server(("127.0.0.1", _OWN_PORTS[number % len(_OWN_PORTS)])) as holder:
            return holder.getsockname()[1]
    raise AssertionError("unreachable: the count is endless")


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"
