"""Anthropic's Messages API: /v1/messages, and /v1/messages/count_tokens.

    blocks ─▶ messages; results of tools are messages of their own        turn ─▶ blocks: thinking, text, tool_use

Invariant: blocks that a client sends back unchanged are the turn's message again. A stream has the same content
as the whole reply.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from learner.gateway.dialects.dialect import AgentRequest, AgentTurn, Dialect, Reply, server_sent_event
from learner.gateway.dialects.request_rules import IN_TEMPLATE, Fixed, RequestRules, refuse_values
from learner.gateway.messages import REASONING, RefusedRequest, read_messages, text_of
from learner.prompts.chat_template import Message

Block = dict[str, Any]
FIXED_KEYS: Fixed = {
    "mcp_servers": ([], "offer their tools as tools of the agent"),
    "container": (None, "run code in the agent"),
    "context_management": (None, "send the messages as the policy shall see them"),
}
IN_OUTPUT_CONFIG: Fixed = {"effort": (None, IN_TEMPLATE)}
IN_THINKING: Fixed = {"type": ("adaptive", IN_TEMPLATE)}
"""The policy itself decides how much it thinks."""
ERROR_TYPES = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error",
}  # fmt: skip
PING = server_sent_event({"type": "ping"}, "ping")


class MessagesBody(msgspec.Struct, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    """Unset: the run's own limit."""
    system: str | list[Block] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# --- requests -------------------------------------------------------------------------------------------------------
def read(content: bytes, rules: RequestRules) -> AgentRequest:
    body = rules.read_body(MessagesBody, content, "the Messages API", FIXED_KEYS)
    refuse_values(body.thinking or {}, IN_THINKING, "thinking.")
    refuse_values(body.output_config or {}, IN_OUTPUT_CONFIG, "output_config.")
    choice = (body.tool_choice or {}).get("type", "auto")
    if choice not in ("auto", "none"):
        rules.refuse_forced_tool(body.tool_choice, "type 'auto' or 'none'")
    rules.refuse_forced_format("output_config.format", (body.output_config or {}).get("format"))
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())]
    return AgentRequest(
        conversation=read_messages(_messages_of(body), "messages"),
        tools=tools if choice != "none" else [],
        template_arguments=body.chat_template_kwargs or {},
        max_tokens=rules.max_tokens("max_tokens", body.max_tokens),
        stops=rules.stops("stop_sequences", body.stop_sequences),
        is_stream=bool(body.stream),
        body=body,
    )


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool in the form of chat completions, as their module reads it."""
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
        raise RefusedRequest(
            f"{where} has type {tool.get('type')!r} and name {tool.get('name')!r}, expected a named tool with an "
            "input_schema: the gateway has no tools of its own; run it in the agent",
            parameter=where,
        )
    as_function = {"name": "name", "description": "description", "input_schema": "parameters"}
    named = {name: tool[key] for key, name in as_function.items() if tool.get(key) is not None}
    return {"type": "function", "function": named}


def _messages_of(body: MessagesBody) -> list[tuple[str, Message]]:
    named: list[tuple[str, Message]] = []
    if body.system:
        named.append(("system", {"role": "system", "content": text_of(body.system, "system", "system")}))
    for number, message in enumerate(body.messages):
        named += _read(message, f"messages[{number}]")
    if named and named[-1][1].get("role") == "assistant":
        raise RefusedRequest(
            "messages ends with a message of the assistant, which the policy does not continue; end with one of the "
            "user",
            parameter="messages",
        )
    return named


def _read(message: dict[str, Any], where: str) -> Iterator[tuple[str, Message]]:
    """Yield a message of the user or the system, the results of tools before or after it, or one of the assistant."""
    content = message.get("content")
    if not isinstance(content, list):
        yield where, message
    elif message.get("role") == "assistant":
        yield where, _assistant(content, where)
    else:
        texts: list[Block] = []
        for number, block in enumerate(content):
            path = f"{where}.content[{number}]"
            kind = _kind_of(block, path, ("text", "tool_result"))
            if kind == "tool_result":
                if texts:
                    yield where, {"role": message.get("role"), "content": texts}
                    texts = []
                result = text_of(block.get("content"), path, "messages")
                yield path, {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
            else:
                texts.append(block)
        if texts or not content:
            yield where, {"role": message.get("role"), "content": texts}


def _assistant(blocks: list[Block], where: str) -> Message:
    message: Message = {"role": "assistant", "content": "", REASONING: "", "tool_calls": []}
    for number, block in enumerate(blocks):
        path = f"{where}.content[{number}]"
        match _kind_of(block, path, ("text", "thinking", "tool_use")):
            case "text":
                message["content"] += text_of([block], path, "messages")
            case "thinking":
                message[REASONING] += text_of({"text": block.get("thinking")}, path, "messages")
            case _:
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                message["tool_calls"].append({"id": block.get("id"), "function": function})
    return message


def _kind_of(block: Any, where: str, expected: tuple[str, ...]) -> str:
    """Return the type of a block. Raises RefusedRequest unless it is an expected one."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in expected:
        raise RefusedRequest(
            f"{where} has type {kind!r}, expected {' or '.join(map(repr, expected))}; the policy sees only text",
            parameter="messages",
        )
    return str(kind)


# --- replies --------------------------------------------------------------------------------------------------------
def reply(turn: AgentTurn) -> Reply:
    return {
        "id": f"msg_{turn.sampled.turn_id}", "type": "message", "role": "assistant", "model": turn.model,
        "content": _blocks(turn), "stop_reason": _stop_reason(turn), "stop_sequence": turn.stop,
        "usage": {
            "input_tokens": len(turn.sampled.prompt) - turn.sampled.num_cached_tokens,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": turn.sampled.num_cached_tokens,
            "output_tokens": len(turn.sampled.token_ids),
        },
    }  # fmt: skip


def _blocks(turn: AgentTurn) -> list[Block]:
    message, blocks = turn.message, []
    calls = message.get("tool_calls", ())
    if REASONING in message:
        # Clients send back only thinking that is signed.
        blocks.append({"type": "thinking", "thinking": message[REASONING], "signature": turn.sampled.turn_id})
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for call in calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def _stop_reason(turn: AgentTurn) -> str:
    if turn.message.get("tool_calls"):
        return "tool_use"
    if turn.is_cut_off:
        return "max_tokens"
    return "end_turn" if turn.stop is None else "stop_sequence"


# --- streams --------------------------------------------------------------------------------------------------------
def events(whole: Reply, request: AgentRequest) -> Iterator[bytes]:
    for kind, data in _events(whole):
        yield server_sent_event({"type": kind, **data}, kind)


def _events(whole: Reply) -> Iterator[tuple[str, Reply]]:
    opened = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": whole["usage"] | {"output_tokens": 0}}
    yield "message_start", {"message": whole | opened}
    for index, block in enumerate(whole["content"]):
        empty, deltas = _parts_of(block)
        yield "content_block_start", {"index": index, "content_block": empty}
        for delta in deltas:
            yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ending = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    yield "message_delta", {"delta": ending, "usage": whole["usage"]}
    yield "message_stop", {}


def _parts_of(block: Block) -> tuple[Block, list[Block]]:
    """Return the block with which a stream opens, and what is added to it."""
    match block["type"]:
        case "thinking":
            signed = {"type": "signature_delta", "signature": block["signature"]}
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}, signed]
            return block | {"thinking": "", "signature": ""}, deltas
        case "tool_use":
            text = msgspec.json.encode(block["input"]).decode()
            return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]
        case _:
            return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]


def error(refused: RefusedRequest) -> Reply:
    kind = ERROR_TYPES.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def error_event(refused: RefusedRequest) -> bytes:
    return server_sent_event(error(refused), "error")


ANTHROPIC_MESSAGES = Dialect(
    path="/v1/messages", count_path="/v1/messages/count_tokens", read=read, reply=reply, events=events, error=error,
    error_event=error_event, keep_alive=PING,
)  # fmt: skip
