"""Parse and check an agent's requests, and format turns as replies, in OpenAI's format.

    /v1/chat/completions, /v1/completions ─▶ request ─▶ session ─▶ turn ─▶ a reply, or equivalent stream events

These pure functions sit between the gateway and the session.
Invariant: an agent never changes how the run samples, because the learner trains with the logprobs of that
distribution. Values that differ are refused, or dropped with learner.environment.override_sampling. Equal or
missing values are accepted. Keys that change no token are ignored.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from learner.config import SamplingConfig
from learner.gateway.messages import REASONING, RefusedRequest
from learner.gateway.session import SessionTurn
from learner.prompts.chat_template import ChatTemplate, Message
from protocol.messages import MAX_STOP_LENGTH, MAX_STOPS

Reply = dict[str, Any]
OF_RUN = ("temperature", "top_p", "top_k")
"""Keys that learner.sampling sets."""
FIXED: dict[str, Any] = {
    "n": 1, "best_of": 1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1,
    "logit_bias": {},
    "echo": False, "suffix": "", "top_logprobs": 0, "min_tokens": 0, "ignore_eos": False, "use_beam_search": False,
    "length_penalty": 1,
    "stop_token_ids": [], "bad_words": [], "allowed_token_ids": [], "logits_processors": [],
    "repetition_detection": None,
    "structured_outputs": None, "guided_json": None, "guided_regex": None, "guided_choice": None,
    "guided_grammar": None,
}  # fmt: skip
"""Keys with the only value that the run accepts."""
OMIT = "omit it, or set learner.environment.override_sampling = true to ignore it"
OVERRIDDEN = {*OF_RUN, *FIXED, "seed", "response_format"}
"""Keys that learner.environment.override_sampling drops."""
OTHERWISE: dict[str, tuple[Any, str]] = {
    "functions": ([], "use tools instead"),
    "function_call": ("auto", "omit it; tool_choice = 'none' leaves the tools out of the prompt"),
    "reasoning_effort": (None, "set the template's own argument in learner.data.chat_template_kwargs"),
    "chat_template": (None, "omit it: episodes use the tokenizer's chat template"),
    "documents": ([], "put them into the messages"),
    "continue_final_message": (False, "end the messages with a user or tool message"),
    "add_generation_prompt": (True, "omit it: the policy always answers"),
    "truncate_prompt_tokens": (None, "send fewer messages"),
}
"""Keys of OpenAI and vLLM that change the prompt: the value without effect, and the remedy."""
END_OF_STREAM = b"data: [DONE]\n\n"


class Body(msgspec.Struct, kw_only=True):
    """Fields of both kinds of requests."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | int | None = None
    """Request for logprobs, in chat completions only. The other form needs more than the engine returns."""
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    """vLLM's key to return the tokens."""

    @property
    def includes_usage(self) -> bool:
        """True if the stream is to report the usage."""
        return bool((self.stream_options or {}).get("include_usage"))


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TextBody(Body, kw_only=True):
    prompt: str | list[Any]


AnyBody = TypeVar("AnyBody", ChatBody, TextBody)


def read_body(kind: type[AnyBody], content: bytes, sampling: SamplingConfig, *, overrides: bool = False) -> AnyBody:
    """Parse and check a request's body.

    `overrides`: the run's sampling replaces the agent's.

    Raises:
        RefusedRequest: If the body is malformed or requests what the run does not support.
    """
    try:
        raw = msgspec.json.decode(content, type=dict[str, Any])
        _refuse_other_prompts(raw)
        if overrides:
            raw = {key: value for key, value in raw.items() if key not in OVERRIDDEN}
            if raw.get("tool_choice") != "none":  # "none" leaves the tools out of the prompt
                raw.pop("tool_choice", None)
        _refuse_other_sampling(raw, sampling)
        body = msgspec.convert(raw, kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RefusedRequest(
            f"the body is not a valid request for {kind.__name__.removesuffix('Body').lower()} completions: {error}"
        ) from error
    if isinstance(body, ChatBody):
        _refuse_forced_forms(body)
    elif body.logprobs not in (None, False):
        raise RefusedRequest("text completions do not return logprobs; use chat completions", parameter="logprobs")
    return body


def max_tokens_of(body: Body, sampling: SamplingConfig) -> int:
    """Return the token limit of one turn. Raises RefusedRequest if the agent's is below 1."""
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if wanted is not None and wanted < 1:
        raise RefusedRequest(f"max_tokens = {wanted} must be at least 1", parameter="max_tokens")
    return min(sampling.max_tokens, math.inf if wanted is None else wanted)  # type: ignore[return-value]


def stops_of(body: Body, sampling: SamplingConfig) -> tuple[str, ...]:
    """Return the stop texts of the turn that the run does not have.

    Raises:
        RefusedRequest: If there are too many, or if one is empty or too long.
    """
    wanted = [body.stop] if isinstance(body.stop, str) else body.stop or []
    more = tuple(dict.fromkeys(text for text in wanted if text not in sampling.stop))
    if len(more) + len(sampling.stop) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_LENGTH for text in more):
        raise RefusedRequest(
            f"stop = {wanted} is not supported; with the {len(sampling.stop)} of the run (learner.sampling.stop), "
            f"send at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters",
            parameter="stop",
        )
    return more


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Cut a text before the stop text that ended the turn, as OpenAI does."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def _refuse_other_sampling(raw: dict[str, Any], sampling: SamplingConfig) -> None:
    of_run = {name: getattr(sampling, name) for name in OF_RUN}
    for name, expected in (of_run | FIXED).items():
        value = raw.get(name)
        if value is None or value == expected or (name == "top_k" and expected == 0 and value == -1):
            continue
        remedy = f"set learner.sampling.{name}, or {OMIT}" if name in of_run else OMIT
        raise RefusedRequest(
            f"{name} = {value!r} is not supported, expected {expected!r}: the learner trains on the distribution from "
            f"which the run samples; {remedy}",
            code="fixed_by_the_run",
            parameter=name,
        )
    if raw.get("seed") is not None:
        raise RefusedRequest(
            f"seed = {raw['seed']!r} is not supported, because all episodes of a group would be the same; omit it, or "
            "set learner.sampling.seeded for reproducible runs",
            code="fixed_by_the_run",
            parameter="seed",
        )


def _refuse_other_prompts(raw: dict[str, Any]) -> None:
    for name, (expected, remedy) in OTHERWISE.items():
        if (value := raw.get(name)) is not None and value != expected:
            raise RefusedRequest(
                f"{name} = {str(value)[:200]} is not supported, expected {expected!r}; {remedy}", parameter=name
            )


def _refuse_forced_forms(body: ChatBody) -> None:
    """Refuse forced tool calls and response formats.

    A grammar would exclude tokens that the learner counts as possible.
    """
    if body.tool_choice not in (None, "auto", "none"):
        raise RefusedRequest(
            f"tool_choice = {body.tool_choice!r} is not supported, expected 'auto' or 'none': the policy learns to "
            f"call tools and is not forced to; {OMIT}",
            parameter="tool_choice",
        )
    form = (body.response_format or {}).get("type", "text")
    if form != "text":
        raise RefusedRequest(
            f"response_format of type {form!r} is not supported, expected 'text': the policy learns formats and is "
            f"not forced into one; {OMIT}",
            parameter="response_format",
        )


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
