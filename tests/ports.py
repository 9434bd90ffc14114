"""Free ports for servers that a test starts, each handed out once.

Below those that the kernel gives to connections: a server binds its port only after its engine has started, up to a
minute later on a loaded machine, and one that the kernel had chosen would by then be another test's connection. Every
worker of a test run has ports of its own for the same reason, and no seed that a test sets can make two draw alike.
"""

import itertools
import os
import random
import socket
from contextlib import suppress

NUM_WORKERS = 8
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % NUM_WORKERS
_OWN_PORTS = range(10_000 + _WORKER, 32_000, NUM_WORKERS)
# Two test runs beside each other begin at different places.
_NUMBERS = itertools.count(random.SystemRandom().randrange(len(_OWN_PORTS)))


def free_port() -> int:
    for number in _NUMBERS:
        with suppress(OSError), socket.create_server(("127.0.0.1", _OWN_PORTS[number % len(_OWN_PORTS)])) as holder:
            return holder.getsockname()[1]
    raise AssertionError("counting never ends")


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"
