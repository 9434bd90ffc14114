"""The HTTP port, taken before the engine starts."""

import os
import socket

from inference_server.config import ServerConfig
from protocol.errors import ConfigError


def listen(config: ServerConfig) -> socket.socket | None:
    """Take it; None when HTTP is off. Raises ConfigError."""
    if config.http_port == 0:
        return None
    try:
        return socket.create_server((config.http_host, config.http_port))
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.http_host}:{config.http_port}: {os.strerror(error.errno or 0)}. "
            "Stop the process that holds the port, or choose another with server.http_port (0 turns HTTP off)."
        ) from error
