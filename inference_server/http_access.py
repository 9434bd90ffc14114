"""Access to the HTTP API: its port, its key, and the routes that are served.

    request ─▶ ApiKeyGate: valid key? ─▶ RouteGate: listed? whole weights? not draining? ─▶ vLLM's application

The port is taken before the engine starts. vLLM's application has many more routes, some of which act on the
engine, and its --api-key guards only a few. The key here guards all routes except health checks and
monitoring.

Invariant: a path that is not in `SERVED` never reaches vLLM's application. This module does not import vLLM.
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
"""Retry-After of a 503 response, in seconds. It is short, because the learner repeats a failed sync at
once."""
REMEDIES = {
    errno.EADDRINUSE: "Stop the process that holds the port, or choose another with server.http_port (0 turns HTTP "
    "off).",
    errno.EADDRNOTAVAIL: "Set server.http_host to an address of this machine, or to 0.0.0.0 or :: for all of them.",
    errno.EACCES: "Set server.http_port to 1024 or more: ports below 1024 require root.",
}
OTHERWISE = "Correct server.http_host, or choose another port with server.http_port (0 turns HTTP off)."


class Kind(Enum):
    """Requirements of a route."""

    WORK = "work"
    """The key and whole weights: requests to the model, and helpers of such requests."""
    HEALTH = "health"
    """No key, but 503 while WORK is refused, so that a load balancer uses another server."""
    MONITORING = "monitoring"
    """No requirement."""


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
"""All served routes, in FastAPI's path syntax. Only our own routes have placeholders: a placeholder of a vLLM
route would also match sibling routes. By default, vLLM does not store answers of /v1/responses, so there is
no route to fetch them."""
OPEN_PATHS = {path for path, kind in SERVED.items() if kind is not Kind.WORK}
"""Paths that need no key."""
_PATTERNS = [(compile_path(path)[0], kind) for path, kind in SERVED.items() if "{" in path]


def kind_of(path: str) -> Kind | None:
    """Return what a path requires, or None if the path is not served."""
    path = path.rstrip("/")
    if (kind := SERVED.get(path)) is not None:
        return kind
    return next((kind for pattern, kind in _PATTERNS if pattern.match(path)), None)


class RouteGate:
    """ASGI middleware that admits only served routes.

    It answers 404 for any other route, and 503 while there are no whole weights or the server drains. Without
    it, a request would wait for a weight sync. Running requests continue.
    """

    def __init__(self, app: ASGIApp, status: Status) -> None:
        self._app, self._status = app, status
        self.num_open = 0
        """Number of admitted requests that are running, without health checks and monitoring."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await WebSocketClose(reason="this server does not support WebSocket")(scope, receive, send)
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
    """Return an error in the format of OpenAI and Anthropic clients."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"type": "error", "error": error}, status, headers)


def _not_served(path: str) -> JSONResponse:
    return error_answer(404, "NotFoundError", f"{path} is not served here; the served routes are: {', '.join(SERVED)}")


def _unavailable(reason: str) -> JSONResponse:
    message = f"{reason}. Try again in {RETRY_AFTER_S} s; /status shows when the server is available again"
    return error_answer(503, "ServiceUnavailableError", message, **{"Retry-After": str(RETRY_AFTER_S)})


def listen(config: ServerConfig) -> socket.socket | None:
    """Bind the HTTP port, or return None if HTTP is off.

    Raises:
        ConfigError: The address cannot be bound.
    """
    if config.http_port == 0:
        return None
    host = http_host(config)
    try:
        # A name with both kinds of addresses is bound by IPv4, as endpoints are.
        found = socket.getaddrinfo(host, config.http_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        return socket.create_server(
            address[:2], family=family, dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6()
        )
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is not a valid name.
        number = error.errno if isinstance(error, OSError) and not isinstance(error, socket.gaierror) else None
        reason = os.strerror(number) if number else str(error)
        raise ConfigError(
            f"cannot listen on {address_of(config)} (server.http_host = {config.http_host!r}): {reason}. "
            f"{REMEDIES.get(number or 0, OTHERWISE)}"
        ) from error


def http_host(config: ServerConfig) -> str:
    """Return the host without the brackets of an IPv6 address in a URL."""
    host = config.http_host
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def address_of(config: ServerConfig) -> str:
    """Return host and port as they appear in a URL."""
    return join_address(http_host(config), config.http_port)


def read_api_key(config: ServerConfig, *, insecure: bool) -> str | None:
    """Return the key of server.api_key_file or VLLM_API_KEY, if any.

    Raises:
        ConfigError: The address needs a key and there is none, or the key file is unusable.
    """
    if config.api_key_file is not None:
        return read_secret(Path(config.api_key_file), f"server.api_key_file = {config.api_key_file!r}")
    key = os.environ.get("VLLM_API_KEY", "").strip() or None  # a key from a file ends with a newline
    if config.http_port and key is None and not insecure and not is_loopback(http_host(config)):
        raise ConfigError(
            f"server.http_host = {config.http_host!r} is reachable from other machines, and without a key anyone there "
            "could use the model; set server.api_key_file, or server.http_port = 0 to turn HTTP off, or insecure = true"
        )
    return key


class ApiKeyGate:
    """ASGI middleware that requires `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it.

    It answers 401 without the key, except for OPEN_PATHS.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._digest = app, _digest(key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        # A browser sends OPTIONS to check whether it may send the key.
        return scope["path"].rstrip("/") in OPEN_PATHS or scope.get("method") == "OPTIONS"

    def _has_key(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        sent = [bearer] if scheme.lower() == "bearer" else []
        sent += headers.getlist("x-api-key")
        return any(secrets.compare_digest(_digest(key), self._digest) for key in sent)


def _digest(key: str) -> bytes:
    """Return a digest of the same length for any key, for a constant-time comparison."""
    return hashlib.sha256(key.encode()).digest()
