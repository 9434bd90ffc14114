"""OpenAI's chat completions: /v1/chat/completions, whose messages are also those of the gateway.

Invariant: a stream has the same content as the whole reply. The turn is complete, so each part is one event.
"""

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from learner.gateway.dialects import openai_form
from learner.gateway.dialects.dialect import AgentRequest, AgentTurn, Dialect, Reply, server_sent_event
from learner.gateway.dialects.request_rules import IN_TEMPLATE, Fixed, RequestRules
from learner.gateway.messages import REASONING, read_messages
from learner.prompts.chat_template import Message

FIXED_KEYS: Fixed = {
    "functions": ([], "use tools instead"),
    "function_call": ("auto", "omit it; tool_choice = 'none' leaves the tools out of the prompt"),
    "reasoning_effort": (None, IN_TEMPLATE),
    "add_special_tokens": (False, "omit it: the chat template writes them"),
}


class ChatBody(msgspec.Struct, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    """vLLM's key to return the tokens."""


def read(content: bytes, rules: RequestRules) -> AgentRequest:
    body = rules.read_body(ChatBody, content, "chat completions", FIXED_KEYS)
    if body.tool_choice not in (None, "auto", "none"):
        rules.refuse_forced_tool(body.tool_choice, "'auto' or 'none'")
    rules.refuse_forced_format("response_format", body.response_format)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    named = ((f"messages[{number}]", message) for number, message in enumerate(body.messages))
    return AgentRequest(
        conversation=read_messages(named, "messages"),
        tools=[_tool(tool) for tool in body.tools or ()] if body.tool_choice != "none" else [],
        template_arguments=body.chat_template_kwargs or {},
        max_tokens=rules.max_tokens("max_tokens", wanted),
        stops=rules.stops("stop", body.stop),
        is_stream=bool(body.stream),
        body=body,
    )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool without `strict`, which asks for a grammar: it means nothing to the policy, and each dialect has
    another default."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    return tool | {"function": {key: value for key, value in function.items() if key != "strict"}}


def reply(turn: AgentTurn) -> Reply:
    message, body = turn.message, turn.request.body
    calls = openai_form.calls_as_json_text(message)
    sent: Message = {"role": "assistant", "content": message["content"] or (None if calls else "")}
    if REASONING in message:
        sent[REASONING] = message[REASONING]
    if calls:
        sent["tool_calls"] = calls
    reason = "tool_calls" if calls else turn.sampled.completion.finish_reason
    choice: dict[str, Any] = {"index": 0, "message": sent, "finish_reason": reason, "logprobs": None}
    if body.logprobs:
        choice["logprobs"] = {"content": _logprobs(turn), "refusal": None}
    if body.return_token_ids:
        choice["token_ids"] = turn.sampled.token_ids
    return {
        "id": f"chatcmpl-{turn.sampled.turn_id}", "object": "chat.completion", "created": int(time.time()),
        "model": turn.model, "choices": [choice], "usage": openai_form.usage(turn),
    } | ({"prompt_token_ids": turn.sampled.prompt.tolist()} if body.return_token_ids else {})  # fmt: skip


def events(whole: Reply, request: AgentRequest) -> Iterator[bytes]:
    (choice,) = whole["choices"]
    common = {key: value for key, value in whole.items() if key not in ("choices", "usage")}
    common["object"] = "chat.completion.chunk"
    parts: list[dict[str, Any]] = [{"delta": delta, "logprobs": None} for delta in _deltas(choice["message"])]
    parts[-1]["logprobs"] = choice["logprobs"]
    for part in parts:
        yield server_sent_event(common | {"choices": [{"index": 0, **part, "finish_reason": None}]})
    more = {"token_ids": choice["token_ids"]} if "token_ids" in choice else {}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], **more}
    yield server_sent_event(common | {"choices": [end]})
    if (request.body.stream_options or {}).get("include_usage"):
        yield server_sent_event(common | {"choices": [], "usage": whole["usage"]})
    yield openai_form.END_OF_STREAM


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if REASONING in message:
        yield {REASONING: message[REASONING]}
    if message["content"]:
        yield {"content": message["content"]}
    for number, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": number, **call}]}


def _logprobs(turn: AgentTurn) -> list[dict[str, Any]]:
    single = [[token] for token in turn.sampled.token_ids]
    texts = turn.template.tokenizer.batch_decode(single, skip_special_tokens=False)
    logprobs = turn.sampled.completion.behavior_logprobs.tolist()
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, logprobs, strict=True)
    ]


CHAT_COMPLETIONS = Dialect(
    path="/v1/chat/completions", read=read, reply=reply, events=events, error=openai_form.error,
    error_event=openai_form.error_event, keep_alive=openai_form.KEEP_ALIVE,
)  # fmt: skip
