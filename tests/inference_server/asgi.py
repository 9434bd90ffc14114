"""Send requests to an ASGI application without a socket."""

import asyncio
import re
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Answer = tuple[int, dict[str, str], bytes]


async def everything(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers every request."""
    await PlainTextResponse("reached")(scope, receive, send)


async def ask(
    app: ASGIApp,
    path: str,
    method: str = "GET",
    body: tuple[bytes, ...] = (b"",),
    headers: dict[str, str] | None = None,
) -> Answer:
    """Return status, headers and body. The request's body arrives in chunks, then the client disconnects."""
    scope: dict[str, Any] = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "scheme": "http", "http_version": "1.1",
    }  # fmt: skip
    coming: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": number < len(body)} for number, piece in enumerate(body, 1)
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return coming.pop(0) if coming else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *pieces = sent
    head = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], head, b"".join(piece.get("body", b"") for piece in pieces)


def status_behind(gate: ASGIApp, path: str, method: str = "GET", **headers: str) -> int:
    return asyncio.run(ask(gate, path, method, headers=headers))[0]


def as_asked(path: str) -> str:
    """Replace the placeholders of a path."""
    return re.sub(r"\{[^}]*\}", "something", path)
