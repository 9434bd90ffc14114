"""Requests with tools to a server that has no parser to read a call from the answer: refused, with the missing key.

vLLM's own answers name its flags, or, from /v1/responses, give the call as plain text.
"""

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_server.routes import error_answer

PATHS = {"/v1/chat/completions", "/v1/responses", "/v1/messages"}
"""Where tools can be asked for."""
REASON = (
    "tools need server.tool_call_parser, which is not set here: set it to the format of the model's tool calls "
    '(hermes, llama3_json, mistral, ...), or send the request without tools or with tool_choice "none"'
)


class RefuseTools:
    """ASGI middleware for a server without server.tool_call_parser."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].rstrip("/") not in PATHS:
            await self._app(scope, receive, send)
            return
        messages = await _whole(receive)
        if _asks_for_tools(b"".join(message.get("body", b"") for message in messages)):
            await error_answer(400, "BadRequestError", REASON, "tools")(scope, receive, send)
            return

        async def receive_again() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, receive_again, send)


async def _whole(receive: Receive) -> list[Message]:
    """Return all messages of a request's body, as they came."""
    messages = [await receive()]
    while messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _asks_for_tools(body: bytes) -> bool:
    """A body that is not JSON is vLLM's to refuse."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(asked, dict) and bool(asked.get("tools")) and not _is_none(asked.get("tool_choice"))


def _is_none(tool_choice: Any) -> bool:
    """As OpenAI's clients say it, or as Anthropic's do."""
    return tool_choice == "none" or (isinstance(tool_choice, dict) and tool_choice.get("type") == "none")
