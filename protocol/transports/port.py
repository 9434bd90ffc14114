"""Listening port of one rank. The learner's is that of its rendezvous, a worker's is for the next rank of a chain."""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence

from protocol.endpoint import join_address, needs_ipv6
from protocol.errors import PushError

POLL_S = 0.02
IDLE_TIMEOUT_S = 10.0
"""Timeout of a silent connection, in seconds. A rank that joins sends queries continuously."""


class Port:
    """Port whose connections are served in threads of their own, until `close`.

    It listens on one address, on the first free port of `ports` (0: any).
    """

    def __init__(self, host: str, ports: Sequence[int], serve: Callable[[socket.socket], None]) -> None:
        self._serve_connection = serve
        self._is_closed = False
        self._listener = _listen_on(host, ports)
        self.number: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, name="port", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Connections that are being served are left alone."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # otherwise `accept` keeps it open
        self._thread.join()
        self._listener.close()

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or no descriptor is free
                time.sleep(POLL_S)
                continue
            connection.settimeout(IDLE_TIMEOUT_S)
            threading.Thread(target=self._serve, args=(connection,), name="port-connection", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # ValueError: no JSON, no request, or no UTF-8
        with contextlib.suppress(OSError, ValueError, PushError), connection:
            self._serve_connection(connection)


def _listen_on(host: str, ports: Sequence[int]) -> socket.socket:
    for port in ports:
        try:
            return socket.create_server((host, port), family=socket.AF_INET6 if needs_ipv6(host) else socket.AF_INET)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise PushError(
                    f"cannot listen on {join_address(host, port)} ({error.strerror or error}); check the address, or "
                    "change learner.weight_sync.ports"
                ) from error
    raise PushError(
        f"no port from {ports[0]} to {ports[-1]} is free on {host}; stop the processes that use them, or add ports to "
        "learner.weight_sync.ports"
    )
