"""Convert an agent's messages for the chat template, match recorded turns, and refuse requests.

    messages of a request ─▶ read ─▶ (starts_with: up to a recorded turn) ─▶ the template

This sits between `dialects/` and `session.py`. Messages have the form of chat completions, whatever the dialect.
Invariants: messages that the agent has changed are another conversation. Only the reasoning may be missing,
because many clients do not send it back. No refusal invites a retry: the request would be refused again, and the
run itself has already waited for its servers.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from learner.environments.host import Call
from learner.prompts.chat_template import Message, storable

REASONING = "reasoning_content"
NO_RETRY = {"x-should-retry": "false"}
"""Header that the clients of OpenAI and Anthropic respect."""


class RefusedRequest(Exception):
    """Error response to a request. Each dialect has its own form of it."""

    def __init__(
        self, message: str, *, code: str = "invalid_request", parameter: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter


def unknown_key() -> RefusedRequest:
    return RefusedRequest(
        "the API key belongs to no episode; use the agent's key unchanged (api_key, OPENAI_API_KEY, or "
        "ANTHROPIC_API_KEY)",
        code="invalid_api_key",
        status=401,
    )


def episode_over(state: str) -> RefusedRequest:
    return RefusedRequest(
        f"the episode is over ({state}); send no more requests for it",
        code="episode_over",
        status=410,
    )


def read_messages(messages: Iterable[tuple[str, dict[str, Any]]], parameter: str) -> list[Message]:
    """Convert the messages of a request, each with its path in the request, such as `messages[2]`.

    Raises:
        RefusedRequest: There is none or one is invalid. It names `parameter`.
    """
    read = [_read(message, where, parameter) for where, message in messages]
    if not read:
        raise RefusedRequest(f"{parameter} is empty; expected at least one message", parameter=parameter)
    names = {call["id"]: call["function"]["name"] for one in read for call in one.get("tool_calls", ()) if "id" in call}
    for message in read:
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return read


def spoken(content: str, reasoning: str | None, calls: Sequence[Call], turn_id: str) -> Message:
    """Return a turn of the policy in the same form."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message[REASONING] = reasoning
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{turn_id}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(calls)
        ]
    return message


def starts_with(messages: Sequence[Message], recorded: Sequence[Message]) -> bool:
    return len(messages) >= len(recorded) and all(map(_is_same, messages, recorded))


def _is_same(message: Message, recorded: Message) -> bool:
    """Return whether a message equals a recorded one.

    Clients add a name and strip the policy's text. This changes nothing, because the recorded tokens are
    used.
    """
    return _essence(message) == _essence(
        {key: value for key, value in recorded.items() if key != REASONING or key in message}
    )


def _essence(message: Message) -> Message:
    if message["role"] != "assistant" or not isinstance(message.get("content"), str):
        return message
    return {key: value for key, value in message.items() if key != "name"} | {"content": message["content"].strip()}


def _read(message: dict[str, Any], where: str, parameter: str) -> Message:
    if not isinstance(message.get("role"), str):
        raise RefusedRequest(f"{where} has no role; expected one such as 'user'", parameter=parameter)
    # developer: OpenAI's newer name of the role, which few templates know
    role = "system" if message["role"] == "developer" else message["role"]
    read: Message = {"role": role, "content": text_of(message.get("content"), where, parameter)}
    for key in ("name", "tool_call_id", REASONING):
        if message.get(key):
            read[key] = _text(message[key], f"{key} of {where}", parameter)
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise RefusedRequest(f"tool_calls of {where} is {calls!r}; expected a list", parameter=parameter)
    if calls:
        read["tool_calls"] = [_call(call, where, parameter) for call in calls]
    return read


def _text(value: Any, what: str, parameter: str) -> str:
    if not isinstance(value, str):
        raise RefusedRequest(f"{what} is {str(value)[:200]}; expected a text", parameter=parameter)
    return value


def text_of(content: Any, where: str, parameter: str) -> str:
    """Join text parts. Raises RefusedRequest for other parts, which the policy cannot see."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise RefusedRequest(
            f"the content of {where} has parts that are not text; send text parts only", parameter=parameter
        )
    return "".join(part["text"] for part in parts)


def _call(call: Any, where: str, parameter: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedRequest(f"{where} has a tool call without a function name; add one", parameter=parameter)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # The policy sees its own malformed JSON unchanged.
        with suppress(ValueError, OverflowError, RecursionError):
            arguments = storable(json.loads(arguments))
    read = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    try:
        storable(read)
    except (ValueError, OverflowError, RecursionError) as error:
        raise RefusedRequest(
            f"{where} has a tool call that cannot be stored ({error}); send its arguments as JSON text",
            parameter=parameter,
        ) from error
    return {"id": _text(call["id"], f"the id of a tool call of {where}", parameter), **read} if call.get("id") else read
