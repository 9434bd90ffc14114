"""Whether calls come back: what the chat template writes as a call must be read as that call, before a run begins.

    a tool's schema ─▶ a call of it ─▶ the chat template ─▶ the tokens of a turn ─▶ answer.py ─▶ the same call, or ConfigError

Under material.py. Invariant: a policy that calls its tools as its template does is never taken for one that only talks.
"""

import logging
from typing import Any, get_args

from learner.environments.answer import NO_FORMATS, Unreadable, calls_of, read_answer, renderer_of
from learner.environments.host import Call
from learner.prompts.chat_template import ChatTemplate, Message, num_shared
from protocol.errors import ConfigError, DataError
from protocol.installation import install_command

log = logging.getLogger(__name__)

QUESTION: list[Message] = [{"role": "user", "content": "What is it?"}]
EXAMPLES: dict[str, Any] = {"integer": 7, "string": "seven"}
"""By the JSON type of an argument. Others are left out: some templates write them as Python does, which says nothing about the format."""
NOT_TRIED = ("gpt-oss", "custom")
"""Formats that are not looked for: the first one's package downloads a vocabulary, the second is code of a user's."""


def check_calls(template: ChatTemplate) -> None:
    """Raise ConfigError if a call of a tool does not come back through this template and its reader."""
    if not template.tools:
        return
    call = _example(template.tools[0]["function"])
    try:
        prompt, turn = _written(template, call)
    except DataError as error:
        raise ConfigError(
            f"the policy cannot call tools: the chat template of {_name(template)} takes no message with a call: {error}. Use a model whose "
            "template has tools"
        ) from error
    text = template.tokenizer.decode(turn)
    if call.name not in text:
        log.warning(
            "the chat template of %s does not show calls: one of %s is %r. A policy is told of its tools by the prompt alone, and nobody knows "
            "whether its calls will be read", _name(template), call.name, text,
        )  # fmt: skip
        return
    problem = _problem(template, prompt, turn, call)
    if problem is not None:
        raise ConfigError(
            f"calls of tools would not be read: the chat template of {_name(template)} writes a call of {call.name} as {text!r}, and with "
            f"learner.environment.renderer = {template.renderer!r} {problem}; {_remedy(template, prompt, turn, call)}"
        )


def _remedy(template: ChatTemplate, prompt: list[int], turn: list[int], call: Call) -> str:
    try:
        formats = _formats()
    except ModuleNotFoundError:
        return f"the package renderers knows more formats: {install_command('renderers')}, and name one with that key"
    fitting = [name for name in formats if _fits(template, name, prompt, turn, call)]
    if fitting:
        return f"set that key to {' or '.join(map(repr, fitting))}"
    return (
        f"none of the formats that were tried reads it ({', '.join(NOT_TRIED)} were not); name another with that key, take another model, or play "
        "with an agent (learner.environment.agent), which reads calls itself"
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
    """What stands before a turn that makes the call, and the turn with the token that ends it. Raises DataError."""
    function = {"name": call.name, "arguments": call.arguments}
    calls = {"content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": function}]}
    whole, other = (
        template.token_ids([*QUESTION, {"role": "assistant"} | said], opens_turn=False)
        for said in (calls, {"content": "Q"})
    )
    start = num_shared(whole, other)
    ends = [place for place in range(start, len(whole)) if template.is_end(whole[place])]
    return whole[:start], whole[start : ends[-1] + 1 if ends else len(whole)]


def _problem(template: ChatTemplate, prompt: list[int], turn: list[int], call: Call) -> str | None:
    try:
        read = calls_of(read_answer(template, prompt, turn))
    except Unreadable as error:
        return f"nobody can read it ({error})"
    if [one.name for one in read] == [call.name]:
        return None
    return f"it is read as {', '.join(f'{one.name}({one.arguments})' for one in read)}" if read else "no call is read"


def _formats() -> list[str]:
    """Raises ModuleNotFoundError."""
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
    other = ChatTemplate(template.tokenizer, template.arguments, template.tools, name, template.more_ends)
    return _problem(other, prompt, turn, call) is None


def _name(template: ChatTemplate) -> str:
    return repr(template.tokenizer.name_or_path)
