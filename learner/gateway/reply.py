"""Format a turn as OpenAI's reply: as a whole, or as equivalent stream events.

    turn, text, calls ─▶ chat_reply, text_reply ─▶ (events)

These pure functions sit between the session and the gateway.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from learner.gateway.messages import REASONING
from learner.gateway.request import Body
from learner.gateway.session import SessionTurn
from learner.prompts.chat_template import ChatTemplate, Message

Reply = dict[str, Any]
END_OF_STREAM = b"data: [DONE]\n\n"


def chat_reply(turn: SessionTurn, message: Message, body: Body, model: str, template: ChatTemplate) -> Reply:
    calls = message.get("tool_calls")
    sent: Message = {"role": "assistant", "content": message["content"] or (None if calls else "")}
    if REASONING in message:
        sent[REASONING] = message[REASONING]
    if calls:
        sent["tool_calls"] = [
            call
            | {"function": {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    reason = "tool_calls" if calls else turn.completion.finish_reason
    choice: dict[str, Any] = {"index": 0, "message": sent, "finish_reason": reason, "logprobs": None}
    if body.logprobs:
        choice["logprobs"] = {"content": _logprobs(turn, template), "refusal": None}
    return _reply("chat.completion", "chatcmpl", turn, choice, body, model)


def text_reply(turn: SessionTurn, text: str, body: Body, model: str) -> Reply:
    choice = {"index": 0, "text": text, "finish_reason": turn.completion.finish_reason, "logprobs": None}
    return _reply("text_completion", "cmpl", turn, choice, body, model)


def events(reply: Reply, *, includes_usage: bool) -> Iterator[bytes]:
    """Yield the events of a stream. The turn is complete, so each part is one event."""
    (choice,) = reply["choices"]
    common = {key: value for key, value in reply.items() if key not in ("choices", "usage")}
    if reply["object"] == "chat.completion":
        common["object"] = "chat.completion.chunk"
        deltas: list[dict[str, Any]] = [{"delta": delta, "logprobs": None} for delta in _deltas(choice["message"])]
        deltas[-1]["logprobs"] = choice["logprobs"]
        parts: list[dict[str, Any]] = [*deltas, {"delta": {}}]
    else:
        parts = [{"text": choice["text"], "logprobs": None}, {"text": ""}]
    more = {"token_ids": choice["token_ids"]} if "token_ids" in choice else {}
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        end = {"finish_reason": choice["finish_reason"], **more} if is_last else {"finish_reason": None}
        yield _event(common | {"choices": [{"index": 0, **part, **end}]})
    if includes_usage:
        yield _event(common | {"choices": [], "usage": reply["usage"]})
    yield END_OF_STREAM


def _reply(kind: str, prefix: str, turn: SessionTurn, choice: dict[str, Any], body: Body, model: str) -> Reply:
    num_prompt, num_sampled = len(turn.prompt), len(turn.completion.token_ids)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": turn.num_cached_tokens},
    }
    reply = {
        "id": f"{prefix}-{turn.turn_id}", "object": kind, "created": int(time.time()), "model": model,
        "choices": [choice],
        "usage": usage,
    }  # fmt: skip
    if body.return_token_ids:
        choice["token_ids"] = turn.token_ids
        reply["prompt_token_ids"] = turn.prompt
    return reply


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if REASONING in message:
        yield {REASONING: message[REASONING]}
    if message["content"]:
        yield {"content": message["content"]}
    for number, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": number, **call}]}


def _logprobs(turn: SessionTurn, template: ChatTemplate) -> list[dict[str, Any]]:
    texts = template.tokenizer.batch_decode([[token] for token in turn.token_ids], skip_special_tokens=False)
    logprobs = turn.completion.behaviour_logprobs.tolist()
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(texts, logprobs, strict=True)
    ]


def _event(part: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(part) + b"\n\n"
