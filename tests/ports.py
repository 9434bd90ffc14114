"""Free ports for servers that a test starts.

Below those that the kernel gives to connections: a server binds its port only after its engine has started, up to a
minute later on a loaded machine, and one that the kernel had chosen would by then be another test's connection.
"""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.randint(10_000, 32_000))) as holder:
            return holder.getsockname()[1]
