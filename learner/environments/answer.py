"""Parse a policy's turn in a conversation into text, reasoning and tool calls.

learner.environment.tool_call_format names the format, which the package `renderers` reads. Without that key, it is
the tokenizer's own format (`response_template`), else the Hermes format of Qwen's and many other models:
<think>…</think>, <tool_call>{"name": …, "arguments": …}</tool_call>. transformers parses these two.

    tool schema ─▶ a call ─▶ chat template ─▶ tokens of a turn ─▶ read_answer ─▶ the same call, or ConfigError

Invariant: before a run starts, a call that its template writes has been read back. A policy that calls tools
as it was taught is therefore never mistaken for one that only talks.
"""

import json
import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from learner.environments.host import Call
from learner.prompts.chat_template import ChatTemplate, Message, num_shared, storable
from learner.prompts.reasoning import OPENS_REASONING, opening_of
from protocol.errors import ConfigError, DataError
from protocol.installation import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

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


QUESTION: list[Message] = [{"role": "user", "content": "What is it?"}]
EXAMPLES: dict[str, Any] = {"integer": 7, "string": "seven"}
"""Example arguments by JSON type.

Other types are left out. Some templates write them as Python does, which is no evidence about the format.
"""
NOT_TRIED = ("gpt-oss", "custom")
"""Formats that are not tried. gpt-oss's package downloads a vocabulary, and custom is a user's code."""

NO_FORMATS = ("auto", "default")
"""Names in `renderers` that query the hub by the model's name, or that parse nothing."""


class UnreadableAnswer(Exception):
    """A tool call that cannot be parsed. The error message gives the reason."""


def read_answer(template: ChatTemplate, prompt: list[int], token_ids: list[int]) -> Message:
    """Parse a turn into a message.

    `prompt`: all tokens before the turn, because some templates start the turn there.

    Raises:
        UnreadableAnswer: The turn cannot be parsed.
    """
    try:
        if template.renderer is not None:
            message = read_by_renderer(template.tokenizer, template.renderer, prompt, token_ids, template.tools)
        else:
            message = _read_by_transformers(template, prompt, token_ids)
        return storable(message)
    except Exception as error:  # the policy wrote this, and no parser foresees all it may write
        raise UnreadableAnswer(f"{type(error).__name__}: {error}") from error


def _read_by_transformers(template: ChatTemplate, prompt: list[int], token_ids: list[int]) -> Message:
    """Parse a turn with transformers. Raises ValueError if that fails."""
    tokenizer = template.tokenizer
    if getattr(tokenizer, "response_template", None) is None:
        prefix, form = opening_of(tokenizer, prompt), HERMES
        token_ids = template.without_end(token_ids)
    else:
        prefix, form = _decoded(tokenizer, prompt), None
    message = tokenizer.parse_response(_decoded(tokenizer, token_ids), form, prefix=prefix, tools=list(template.tools))
    return {"content": ""} | message


def calls_of(message: Message) -> list[Call]:
    """Return the tool calls of a message. Raises UnreadableAnswer if one is malformed."""
    return [_call(each.get("function") if isinstance(each, dict) else each) for each in message.get("tool_calls") or ()]


def _call(function: Any) -> Call:
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise UnreadableAnswer(f"the call {function!r} is not an object with name and arguments")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = storable(json.loads(arguments))
        except (ValueError, RecursionError, OverflowError) as error:
            raise UnreadableAnswer(f"the arguments of {name} are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise UnreadableAnswer(f"the arguments of {name} are {arguments!r}; expected an object")
    return Call(name, arguments)


def _decoded(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int]) -> str:
    (text,) = tokenizer.batch_decode([token_ids], skip_special_tokens=False)
    return text


@lru_cache(maxsize=1)
def renderer_of(tokenizer: "PreTrainedTokenizerBase", name: str) -> Any:
    """Return the renderer of a format.

    Raises:
        ConfigError: The package or the format is missing, or the tokenizer does not fit the format.
    """
    key = f"learner.environment.tool_call_format = {name!r}"
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
        raise ConfigError(f"{key} is not a format; set it to one, such as 'qwen3.5', or remove the key")
    try:
        return create_renderer(tokenizer, config)
    except (AssertionError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{key} does not fit the tokenizer of {tokenizer.name_or_path!r}: {error}; set it to the format of this "
            "model, or remove the key"
        ) from error


def read_by_renderer(
    tokenizer: "PreTrainedTokenizerBase", name: str, prompt: list[int], token_ids: list[int],
    tools: list[dict[str, Any]]
) -> Message:  # fmt: skip
    """Parse a turn with the package `renderers`.

    `prompt`: all tokens before the turn.

    Raises:
        ValueError: The turn starts a call that cannot be parsed.
    """
    from renderers.base import ToolCallParseStatus

    # A call of an unknown tool is readable: the policy gets an error as its result.
    readable = (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL)
    functions = [tool["function"] for tool in tools]
    read = renderer_of(tokenizer, name).parse_response(token_ids, tools=functions, prompt_ids=prompt)
    for call in read.tool_calls:
        if call.status not in readable:
            raise ValueError(f"{call.raw!r} is not a valid call ({call.status.value})")
    message: Message = {"role": "assistant", "content": read.content}
    if read.reasoning_content is not None:
        message["reasoning_content"] = read.reasoning_content
    if read.tool_calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in read.tool_calls
        ]
    return message


# --- check that calls can be read back ----------------------------------------------------------------------
def check_calls(template: ChatTemplate) -> None:
    """Raise ConfigError if a tool call cannot be read back through this template."""
    if not template.tools:
        return
    call = _example(template.tools[0]["function"])
    try:
        prompt, turn = _written(template, call)
    except DataError as error:
        raise ConfigError(
            f"the policy cannot call tools: the chat template of {_name(template)} cannot render a message with a "
            f"call: {error}. Use a model whose template supports tools"
        ) from error
    text = template.tokenizer.decode(turn)
    if call.name not in text:
        log.warning(
            "the chat template of %s does not render calls: one of %s is %r. The policy learns of its tools only "
            "from the prompt, and its calls may be unreadable", _name(template), call.name, text,
        )  # fmt: skip
        return
    problem = _problem(template, prompt, turn, call)
    if problem is not None:
        raise ConfigError(
            f"tool calls would be unreadable: the chat template of {_name(template)} writes a call of {call.name} as "
            f"{text!r}, but with learner.environment.tool_call_format = {template.renderer!r} {problem}; "
            f"{_remedy(template, prompt, turn, call)}"
        )


def _remedy(template: ChatTemplate, prompt: list[int], turn: list[int], call: Call) -> str:
    try:
        formats = _formats()
    except ModuleNotFoundError:
        return f"the package renderers has more formats: {install_command('renderers')}, and set that key to one"
    fitting = [name for name in formats if _fits(template, name, prompt, turn, call)]
    if fitting:
        return f"set that key to {' or '.join(map(repr, fitting))}"
    return (
        f"none of the tested formats reads it (not tested: {', '.join(NOT_TRIED)}); set that key to another format, "
        "use another model, or use an agent (learner.environment.agent), which reads calls itself"
    )


def _example(function: dict[str, Any]) -> Call:
    schema = function.get("parameters") or {}
    required, properties = schema.get("required") or [], schema.get("properties") or {}
    types = {name: (properties.get(name) or {}).get("type") for name in required}
    return Call(
        function["name"],
        {name: EXAMPLES[kind] for name, kind in types.items() if isinstance(kind, str) and kind in EXAMPLES},
    )


def _written(template: ChatTemplate, call: Call) -> tuple[list[int], list[int]]:
    """Return the tokens before a turn that makes the call, and those of the turn.

    The turn includes the token that ends it.

    Raises:
        DataError: The template cannot render a message with a call.
    """
    function = {"name": call.name, "arguments": call.arguments}
    calls = {"content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": function}]}
    whole, other = (
        template.token_ids([*QUESTION, {"role": "assistant"} | answer], opens_turn=False)
        for answer in (calls, {"content": "Q"})
    )
    start = num_shared(whole, other)
    ends = [i for i in range(start, len(whole)) if template.is_end(whole[i])]
    return whole[:start], whole[start : ends[-1] + 1 if ends else len(whole)]


def _problem(template: ChatTemplate, prompt: list[int], turn: list[int], call: Call) -> str | None:
    try:
        read = calls_of(read_answer(template, prompt, turn))
    except UnreadableAnswer as error:
        return f"it cannot be parsed ({error})"
    if [one.name for one in read] == [call.name]:
        return None
    return f"it is read as {', '.join(f'{one.name}({one.arguments})' for one in read)}" if read else "no call is found"


def _formats() -> list[str]:
    """Return the formats to try. Raises ModuleNotFoundError without `renderers`."""
    from renderers import RendererConfig

    configs = get_args(get_args(RendererConfig)[0])
    return [
        name for config in configs if (name := config.model_fields["name"].default) not in (*NO_FORMATS, *NOT_TRIED)
    ]


def _fits(template: ChatTemplate, name: str, prompt: list[int], turn: list[int], call: Call) -> bool:
    try:
        renderer_of(template.tokenizer, name)
    except ConfigError:
        return False
    other = msgspec.structs.replace(template, turns=msgspec.structs.replace(template.turns, renderer=name))
    return _problem(other, prompt, turn, call) is None


def _name(template: ChatTemplate) -> str:
    return repr(template.tokenizer.name_or_path)
