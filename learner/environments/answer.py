"""What a policy says in a conversation, read: text, reasoning, calls of tools. Between the tokens of a turn and talk.py.

The format is the one that learner.environment.renderer names, read by the package `renderers`, else the model's own where its tokenizer says it
(`response_template`), else that of Hermes, which Qwen's models and many others have: <think>…</think>,
<tool_call>{"name": …, "arguments": …}</tool_call>. transformers parses the latter two.
"""

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from learner.environments.host import Call
from learner.prompts.chat_template import OPENS_REASONING, ChatTemplate, Message, storable
from protocol.errors import ConfigError
from protocol.installation import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HERMES = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": "^",
    "fields": {
        "reasoning_content": {"open": OPENS_REASONING, "close_pattern": r"</think>\s*"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"repeats": True, "join": ""},
    },
}


NO_FORMATS = ("auto", "default")
"""Names of `renderers` that ask the hub, by the model's name, or read nothing."""


class Unreadable(Exception):
    """A call that cannot be made out; the message says why."""


def read_answer(template: ChatTemplate, prompt: list[int], token_ids: list[int]) -> Message:
    """Return a turn as a message. `prompt`: all that stands before it, for some templates begin it. Raises Unreadable."""
    try:
        if template.renderer is not None:
            message = read_by_renderer(template.tokenizer, template.renderer, prompt, token_ids, template.tools)
        else:
            message = _read_by_transformers(template, prompt, token_ids)
        return storable(message)
    except Exception as error:  # the policy wrote this: no parser knows all that it may make of it
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def _read_by_transformers(template: ChatTemplate, prompt: list[int], token_ids: list[int]) -> Message:
    """Raises ValueError."""
    tokenizer = template.tokenizer
    if getattr(tokenizer, "response_template", None) is None:
        begun = _decoded(tokenizer, prompt[-8:]).rstrip()
        prefix = OPENS_REASONING if begun.endswith(OPENS_REASONING) else ""
        form = HERMES
        token_ids = template.without_end(token_ids)
    else:
        prefix, form = _decoded(tokenizer, prompt), None
    message = tokenizer.parse_response(_decoded(tokenizer, token_ids), form, prefix=prefix, tools=list(template.tools))
    return {"content": ""} | message


def calls_of(message: Message) -> list[Call]:
    """Raises Unreadable."""
    return [_call(each.get("function") if isinstance(each, dict) else each) for each in message.get("tool_calls") or ()]


def _call(function: Any) -> Call:
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise Unreadable(f"{function!r} is called, expected an object with name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = storable(json.loads(arguments))
        except (ValueError, RecursionError, OverflowError) as error:
            raise Unreadable(f"the arguments of {name} are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise Unreadable(f"the arguments of {name} are {arguments!r}, expected an object")
    return Call(name, arguments)


def _decoded(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int]) -> str:
    (text,) = tokenizer.batch_decode([token_ids], skip_special_tokens=False)
    return text


@lru_cache(maxsize=1)
def renderer_of(tokenizer: "PreTrainedTokenizerBase", name: str) -> Any:
    """Raises ConfigError for an unknown name, and where the tokenizer lacks what the format is made of."""
    key = f"learner.environment.renderer = {name!r}"
    try:
        from renderers import configs
        from renderers.base import create_renderer
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key} needs the package {error.name}: {install_command('renderers')}") from error
    try:
        config = configs.config_from_name(name)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error
    if name in NO_FORMATS:
        raise ConfigError(f"{key} names no format; say which, such as 'qwen3.5', or leave the key out")
    try:
        return create_renderer(tokenizer, config)
    except (AssertionError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{key} does not fit the tokenizer of {tokenizer.name_or_path!r}: {error}; name the format of this model, or leave the key out"
        ) from error


def read_by_renderer(
    tokenizer: "PreTrainedTokenizerBase", name: str, prompt: list[int], token_ids: list[int], tools: list[dict[str, Any]]
) -> Message:  # fmt: skip
    """`prompt`: all that stands before the turn. Raises ValueError for a call that it began and nobody can make out."""
    from renderers.base import ToolCallParseStatus

    readable = (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)  # of one that is not there its caller is told
    functions = [tool["function"] for tool in tools]
    read = renderer_of(tokenizer, name).parse_response(token_ids, tools=functions, prompt_ids=prompt)
    for call in read.tool_calls:
        if call.status not in readable:
            raise ValueError(f"{call.raw!r} is no call ({call.status.value})")
    message: Message = {"role": "assistant", "content": read.content}
    if read.reasoning_content is not None:
        message["reasoning_content"] = read.reasoning_content
    if read.tool_calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in read.tool_calls
        ]
    return message
