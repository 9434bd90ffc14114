"""The routes of the HTTP side: which of vLLM's application are served, to whom, and when.

    request ─▶ api_key.py: the key? ─▶ RouteGate: listed? whole weights? not draining? ─▶ vLLM's application

vLLM's application has many more routes, some of which act on the engine, and the next release may bring others.

Invariant: a path that is not in `SERVED` never reaches vLLM's application.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

from starlette.responses import JSONResponse
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

Status = Callable[[], dict[str, Any]]

RETRY_AFTER_S = 5
"""What a client is told to wait while there are no whole weights; the learner tries again at once."""


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
