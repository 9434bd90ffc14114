"""The HTTP port, taken before the engine starts."""

import errno
import os
import socket

from inference_server.config import ServerConfig
from protocol.endpoint import join_address
from protocol.errors import ConfigError

REMEDIES = {
    errno.EADDRINUSE: "Stop the process that holds the port, or choose another with server.http_port (0 turns HTTP "
    "off).",
    errno.EADDRNOTAVAIL: "Set server.http_host to an address of this machine, or to 0.0.0.0 or :: for all of them.",
    errno.EACCES: "Set server.http_port to 1024 or more: those below belong to root.",
}
OTHERWISE = "Correct server.http_host, or choose another port with server.http_port (0 turns HTTP off)."


def listen(config: ServerConfig) -> socket.socket | None:
    """Take it; None when HTTP is off. Raises ConfigError."""
    if config.http_port == 0:
        return None
    host = http_host(config)
    try:
        # A name that has both kinds of addresses is listened at by IPv4, as endpoints are.
        found = socket.getaddrinfo(host, config.http_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        return socket.create_server(
            address[:2], family=family, dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6()
        )
    except (OSError, UnicodeError) as error:  # UnicodeError: of what is no name at all
        number = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
        reason = os.strerror(number) if number else str(error)
        raise ConfigError(
            f"cannot listen on {address_of(config)} (server.http_host = {config.http_host!r}): {reason}. "
            f"{REMEDIES.get(number or 0, OTHERWISE)}"
        ) from error


def http_host(config: ServerConfig) -> str:
    """Without the brackets that an IPv6 address has in a URL."""
    host = config.http_host
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def address_of(config: ServerConfig) -> str:
    """Return host and port as they stand in a URL."""
    return join_address(http_host(config), config.http_port)
