"""OpenAI's Responses API: /v1/responses, without stored responses and without OpenAI's own tools.

    input items ─▶ messages                     turn ─▶ items: reasoning, message, function calls ─▶ events

An assistant's turn is several items, which follow each other in this order.
Invariant: items that a client sends back unchanged are the turn's message again. A stream ends with the same
response that a request without a stream gets.
"""

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from learner.gateway.dialects import openai_form
from learner.gateway.dialects.dialect import AgentRequest, AgentTurn, Dialect, Reply, server_sent_event
from learner.gateway.dialects.request_rules import IN_TEMPLATE, Fixed, RequestRules, refuse_values
from learner.gateway.messages import REASONING, RefusedRequest, read_messages, text_of
from learner.prompts.chat_template import Message

Item = dict[str, Any]
NOT_STORED = "send the whole conversation as input, because the gateway stores no responses"
FIXED_KEYS: Fixed = {
    "previous_response_id": (None, NOT_STORED),
    "conversation": (None, NOT_STORED),
    "prompt": (None, "send the messages as input, because the gateway stores no prompts"),
    "background": (False, "omit it; with stream = true, the connection stays open until the turn is complete"),
    "truncation": ("disabled", "send less input"),
}
IN_REASONING: Fixed = {"effort": (None, IN_TEMPLATE)}
IN_TEXT: Fixed = {"verbosity": ("medium", "ask for it in the messages")}
NO_LOGPROBS = "message.output_text.logprobs"


class ResponsesBody(msgspec.Struct, kw_only=True):
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    """vLLM's key, as in chat completions."""


# --- requests -------------------------------------------------------------------------------------------------------
def read(content: bytes, rules: RequestRules) -> AgentRequest:
    body = rules.read_body(ResponsesBody, content, "the Responses API", FIXED_KEYS)
    refuse_values(body.reasoning or {}, IN_REASONING, "reasoning.")
    refuse_values(body.text or {}, IN_TEXT, "text.")
    if body.tool_choice not in (None, "auto", "none"):
        rules.refuse_forced_tool(body.tool_choice, "'auto' or 'none'")
    rules.refuse_forced_format("text.format", (body.text or {}).get("format"))
    if NO_LOGPROBS in (body.include or ()):
        raise RefusedRequest(f"include = {NO_LOGPROBS!r} is not supported; use chat completions", parameter="include")
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())]
    return AgentRequest(
        conversation=read_messages(_messages_of(body), "input"),
        tools=tools if body.tool_choice != "none" else [],
        template_arguments=body.chat_template_kwargs or {},
        max_tokens=rules.max_tokens("max_output_tokens", body.max_output_tokens),
        stops=rules.stops("stop", body.stop),
        is_stream=bool(body.stream),
        body=body,
    )


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool in the form of chat completions, as their module reads it."""
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise RefusedRequest(
            f"{where} has type {tool.get('type')!r} and name {tool.get('name')!r}, expected a named 'function': the "
            "gateway has no tools of its own; offer it as a function and run it in the agent",
            parameter=where,
        )
    named = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": named}


def _messages_of(body: ResponsesBody) -> list[tuple[str, Message]]:
    """Return the messages of the items, each with the path of its first item."""
    named: list[tuple[str, Message]] = []
    if body.instructions:
        named.append(("instructions", {"role": "system", "content": body.instructions}))
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for number, item in enumerate(items):
        where = f"input[{number}]"
        message = _message_of(item, where)
        last = named[-1][1] if named else {}
        if message["role"] == last.get("role") == "assistant" and _goes_on(last, message):
            last["tool_calls"] = [*last.get("tool_calls", ()), *message.pop("tool_calls", ())]
            last.update(message)
        else:
            named.append((where, message))
    return named


def _goes_on(last: Message, message: Message) -> bool:
    """Return whether an item belongs to the turn of the items before it."""
    if "tool_calls" in message:
        return True
    return "content" in message and "content" not in last and not last.get("tool_calls")


def _message_of(item: Item, where: str) -> Message:
    """Return an item as a message, without the keys that the item does not have.

    Raises:
        RefusedRequest: Its type is not supported.
    """
    match item.get("type", "message"):
        case "message":
            return {"role": item.get("role"), "content": text_of(item.get("content"), where, "input")}
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            return {"role": "assistant", REASONING: text_of(parts, where, "input")}
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or {}}
            return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "function": function}]}
        case "function_call_output":
            content = text_of(item.get("output"), where, "input")
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        case "item_reference":
            raise RefusedRequest(f"{where} has type 'item_reference'; {NOT_STORED}", parameter="input")
        case other:
            raise RefusedRequest(
                f"{where} has type {other!r}, expected 'message', 'reasoning', 'function_call' or "
                "'function_call_output'; leave it out",
                parameter="input",
            )


# --- replies --------------------------------------------------------------------------------------------------------
def reply(turn: AgentTurn) -> Reply:
    body, is_cut_off = turn.request.body, turn.is_cut_off
    return {
        "id": f"resp_{turn.sampled.turn_id}", "object": "response", "created_at": int(time.time()),
        "status": "incomplete" if is_cut_off else "completed", "background": False, "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut_off else None,
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {}, "model": turn.model, "output": _items(turn), "parallel_tool_calls": True,
        "previous_response_id": None, "reasoning": {"effort": None, "summary": None}, "store": False,
        "temperature": None, "text": {"format": {"type": "text"}}, "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [], "top_p": None, "truncation": "disabled", "usage": _usage(turn),
    }  # fmt: skip


def _items(turn: AgentTurn) -> list[Item]:
    message, turn_id = turn.message, turn.sampled.turn_id
    calls = openai_form.calls_as_json_text(message)
    items: list[Item] = []
    if REASONING in message:
        thought = {"type": "reasoning_text", "text": message[REASONING]}
        items.append({"id": f"rs_{turn_id}", "type": "reasoning", "summary": [], "content": [thought]})
    if message["content"] or not calls:
        said = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{turn_id}", "type": "message", "role": "assistant", "content": [said]})
    for number, call in enumerate(calls):
        items.append(
            {"id": f"fc_{turn_id}_{number}", "type": "function_call", "call_id": call["id"], **call["function"]}
        )
    for item in items:
        item["status"] = "incomplete" if turn.is_cut_off else "completed"
    return items


def _usage(turn: AgentTurn) -> Reply:
    """Return the token counts. Reasoning counts as many tokens as its text alone has."""
    num_prompt, num_sampled = len(turn.sampled.prompt), len(turn.sampled.token_ids)
    thought = turn.message.get(REASONING)
    num_reasoning = len(turn.template.tokenizer.encode(thought, add_special_tokens=False)) if thought else 0
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": turn.sampled.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt + num_sampled,
    }


# --- streams --------------------------------------------------------------------------------------------------------
def events(whole: Reply, request: AgentRequest) -> Iterator[bytes]:
    for number, (kind, data) in enumerate(_events(whole)):
        yield server_sent_event({"type": kind, "sequence_number": number, **data}, kind)


def _events(whole: Reply) -> Iterator[tuple[str, Reply]]:
    opened = whole | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield "response.created", {"response": opened}
    yield "response.in_progress", {"response": opened}
    for index, item in enumerate(whole["output"]):
        part = "arguments" if item["type"] == "function_call" else "content"
        empty = item | {part: "" if part == "arguments" else [], "status": "in_progress"}
        yield "response.output_item.added", {"output_index": index, "item": empty}
        at = {"item_id": item["id"], "output_index": index}
        if part == "arguments":
            yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
            done = {**at, "name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", done
        else:
            yield from _content_events(item, {**at, "content_index": 0})
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{whole['status']}", {"response": whole}


def _content_events(item: Item, at: Reply) -> Iterator[tuple[str, Reply]]:
    (part,) = item["content"]
    name, text = f"response.{part['type']}", part["text"]
    more: Reply = {"logprobs": []} if part["type"] == "output_text" else {}
    yield "response.content_part.added", {**at, "part": part | {"text": ""}}
    yield f"{name}.delta", {**at, "delta": text, **more}
    yield f"{name}.done", {**at, "text": text, **more}
    yield "response.content_part.done", {**at, "part": part}


def error_event(refused: RefusedRequest) -> bytes:
    """Return the API's event, with an object `error` besides, for which OpenAI's clients raise an exception."""
    inner = openai_form.error(refused)["error"]
    flat = {"type": "error", "sequence_number": 0, "code": refused.code, "message": str(refused)}
    return server_sent_event({**flat, "param": refused.parameter, "error": inner}, "error")


RESPONSES = Dialect(
    path="/v1/responses", read=read, reply=reply, events=events, error=openai_form.error, error_event=error_event,
    keep_alive=openai_form.KEEP_ALIVE,
)  # fmt: skip
