"""OpenAI's text completions: /v1/completions, with one text or one list of token ids as the prompt."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from learner.gateway.dialects import openai_form
from learner.gateway.dialects.dialect import AgentRequest, AgentTurn, Dialect, Reply, server_sent_event
from learner.gateway.dialects.request_rules import RequestRules
from learner.gateway.messages import RefusedRequest


class TextBody(msgspec.Struct, kw_only=True):
    prompt: str | list[Any]
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | int | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    """vLLM's keys to return the tokens, and to encode the prompt without BOS."""


def read(content: bytes, rules: RequestRules) -> AgentRequest:
    body = rules.read_body(TextBody, content, "text completions", {})
    if body.logprobs not in (None, False):  # they need more logprobs than the engine returns
        raise RefusedRequest("text completions do not return logprobs; use chat completions", parameter="logprobs")
    return AgentRequest(
        text=body.prompt,
        adds_special_tokens=body.add_special_tokens is not False,
        max_tokens=rules.max_tokens("max_tokens", body.max_tokens),
        stops=rules.stops("stop", body.stop),
        is_stream=bool(body.stream),
        body=body,
    )


def reply(turn: AgentTurn) -> Reply:
    text, reason = turn.message["content"], turn.sampled.completion.finish_reason
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
    has_tokens = turn.request.body.return_token_ids
    if has_tokens:
        choice["token_ids"] = turn.sampled.token_ids
    return {
        "id": f"cmpl-{turn.sampled.turn_id}", "object": "text_completion", "created": int(time.time()),
        "model": turn.model, "choices": [choice], "usage": openai_form.usage(turn),
    } | ({"prompt_token_ids": turn.sampled.prompt.tolist()} if has_tokens else {})  # fmt: skip


def events(whole: Reply, request: AgentRequest) -> Iterator[bytes]:
    (choice,) = whole["choices"]
    common = {key: value for key, value in whole.items() if key not in ("choices", "usage")}
    part = {"index": 0, "text": choice["text"], "logprobs": None, "finish_reason": None}
    yield server_sent_event(common | {"choices": [part]})
    yield server_sent_event(common | {"choices": [choice | {"text": ""}]})
    if (request.body.stream_options or {}).get("include_usage"):
        yield server_sent_event(common | {"choices": [], "usage": whole["usage"]})
    yield openai_form.END_OF_STREAM


TEXT_COMPLETIONS = Dialect(
    path="/v1/completions", read=read, reply=reply, events=events, error=openai_form.error,
    error_event=openai_form.error_event, keep_alive=openai_form.KEEP_ALIVE,
)  # fmt: skip
