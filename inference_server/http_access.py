"""Who reaches the HTTP side: its port, its key, and the routes that are open.

    request ─▶ ApiKeyGate: the key? ─▶ RouteGate: listed? whole weights? not draining? ─▶ vLLM's application

The port is taken before the engine starts. vLLM's application has many more routes, some of which act on the engine, and its own
--api-key guards only a few; here the key guards all routes but those of monitoring.

Invariant: a path that is not in `SERVED` never reaches vLLM's application. This module imports no vLLM.
"""

import errno
import hashlib
import os
import secrets
import socket
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from inference_server.config import ServerConfig
from protocol.channel.keys import read_secret
from protocol.endpoint import is_loopback, join_address
from protocol.errors import ConfigError

Status = Callable[[], dict[str, Any]]
RETRY_AFTER_S = 5
"""What a client is told to wait while there are no whole weights; the learner tries again at once."""
REMEDIES = {
    errno.EADDRINUSE: "Stop the process that holds the port, or choose another with server.http_port (0 turns HTTP "
    "off).",
    errno.EADDRNOTAVAIL: "Set server.http_host to an address of this machine, or to 0.0.0.0 or :: for all of them.",
    errno.EACCES: "Set server.http_port to 1024 or more: those below belong to root.",
}
OTHERWISE = "Correct server.http_host, or choose another port with server.http_port (0 turns HTTP off)."


class Kind(Enum):
    """What a route needs."""

    WORK = "work"
    """The key and whole weights: anything that asks the model, or is asked on the way to it."""
    HEALTH = "health"
    """No key, but 503 while WORK is refused: a load balancer then asks another server."""
    MONITORING = "monitoring"
    """Nothing."""


SERVED = {
    "/v1/chat/completions": Kind.WORK,
    "/v1/completions": Kind.WORK,
    "/v1/responses": Kind.WORK,
    "/v1/messages": Kind.WORK,
    "/v1/messages/count_tokens": Kind.WORK,
    "/v1/models": Kind.WORK,
    "/v1/models/{model:path}": Kind.WORK,
    "/tokenize": Kind.WORK,
    "/detokenize": Kind.WORK,
    "/health": Kind.HEALTH,
    "/ping": Kind.HEALTH,
    "/status": Kind.MONITORING,
    "/metrics": Kind.MONITORING,
    "/version": Kind.MONITORING,
    "/load": Kind.MONITORING,
}
"""Every route that is served, as FastAPI writes its path. Placeholders are in our own routes alone: in one of vLLM's, a
sibling would match too. Answers of /v1/responses are not stored, as is vLLM's default, so none can be asked for."""
OPEN_PATHS = {path for path, kind in SERVED.items() if kind is not Kind.WORK}
"""Without the key."""
_PATTERNS = [(compile_path(path)[0], kind) for path, kind in SERVED.items() if "{" in path]


def kind_of(path: str) -> Kind | None:
    """Return what a path needs, None for one that is not served."""
    path = path.rstrip("/")
    if (kind := SERVED.get(path)) is not None:
        return kind
    return next((kind for pattern, kind in _PATTERNS if pattern.match(path)), None)


class RouteGate:
    """ASGI middleware: 404 for what is not served, and 503 while there are no whole weights or the server drains.

    Without it a request would wait for a push. What has begun goes on.
    """

    def __init__(self, app: ASGIApp, status: Status) -> None:
        self._app, self._status = app, status
        self.num_open = 0
        """Requests that were let through and are under way, without those of monitoring."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await WebSocketClose(reason="no WebSocket is served here")(scope, receive, send)
        elif (kind := kind_of(scope["path"])) is None:
            await _not_served(scope["path"])(scope, receive, send)
        elif kind is not Kind.MONITORING and (reason := self._status()["unavailable"]) is not None:
            await _unavailable(reason)(scope, receive, send)
        else:
            await self._pass_on(kind, scope, receive, send)

    async def _pass_on(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        is_work = kind is Kind.WORK
        self.num_open += is_work
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_open -= is_work


def error_answer(status: int, kind: str, message: str, param: str | None = None, **headers: str) -> JSONResponse:
    """An error as OpenAI's clients read it, and Anthropic's."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"type": "error", "error": error}, status, headers)


def _not_served(path: str) -> JSONResponse:
    return error_answer(404, "NotFoundError", f"{path} is not served here; these routes are: {', '.join(SERVED)}")


def _unavailable(reason: str) -> JSONResponse:
    message = f"{reason}. Try again in {RETRY_AFTER_S} s; /status shows when it is over"
    return error_answer(503, "ServiceUnavailableError", message, **{"Retry-After": str(RETRY_AFTER_S)})


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


def read_api_key(config: ServerConfig, *, insecure: bool) -> str | None:
    """Return the key of server.api_key_file or VLLM_API_KEY, if any. Raises ConfigError where one is needed."""
    if config.api_key_file is not None:
        return read_secret(Path(config.api_key_file), f"server.api_key_file = {config.api_key_file!r}")
    key = os.environ.get("VLLM_API_KEY") or None
    if config.http_port and key is None and not insecure and not is_loopback(http_host(config)):
        raise ConfigError(
            f"server.http_host = {config.http_host!r} leaves this machine, and without a key anyone there could use the model; "
            "set server.api_key_file, or http_port = 0 to turn HTTP off, or say insecure = true"
        )
    return key


class ApiKeyGate:
    """ASGI middleware: 401 for every path but OPEN_PATHS without `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._digest = app, _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        # OPTIONS is how a browser asks whether it may send the key.
        return scope["path"].rstrip("/") in OPEN_PATHS or scope.get("method") == "OPTIONS"

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and secrets.compare_digest(_digest(key), self._digest)


def _digest(key: str) -> bytes:
    """Of equal length for all keys, so that comparing takes equally long."""
    return hashlib.sha256(key.encode()).digest()
