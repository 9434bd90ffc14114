"""The key of the HTTP side: where it comes from, and the gate that asks for it.

vLLM's own --api-key guards /v1 and a few others. Here every route but those of monitoring is guarded (routes.py).
"""

import hashlib
import os
import secrets
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from inference_server.config import ServerConfig
from inference_server.listener import http_host
from inference_server.routes import OPEN_PATHS
from protocol.endpoint import is_loopback
from protocol.errors import ConfigError
from protocol.secret_file import read_secret


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
