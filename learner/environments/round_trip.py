"""Whether calls come back: what the chat template writes as a call must be read as that call, before a run begins.

    a tool's schema ─▶ a call of it ─▶ the chat template ─▶ the tokens of a turn ─▶ answer.py ─▶ the same call, or ConfigError

Under players.py. Invariant: a policy that calls its tools as it was taught to is never taken for one that only talks.
"""

from typing import Any, get_args

from learner.environments.answer import NO_FORMATS, Unreadable, calls_of, read_answer, renderer_of
from learner.environments.host import Call
from learner.prompts.chat_template import ChatTemplate, Message, num_shared
from protocol.errors import ConfigError, DataError

QUESTION: list[Message] = [{"role": "user", "content": "What is it?"}]
EXAMPLES: dict[str, Any] = {"integer": 7, "number": 1.5, "boolean": True, "array": [], "object": {}}
"""By the JSON type of an argument; a text for all others."""
NOT_TRIED = ("gpt-oss", "custom")
"""Formats that are not looked for: the first one's package downloads a vocabulary, the second is code of a user's."""


def check_calls(template: ChatTemplate) -> None:
    """Raise ConfigError if calls of the tools do not come back through this template and its reader."""
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
    problem = _problem(template, prompt, turn, call)
    if problem is None:
        return
    text = template.tokenizer.decode(turn)
    if call.name not in text:
        raise ConfigError(
            f"the policy cannot call tools: the chat template of {_name(template)} writes a call of {call.name} as {text!r}. Use a model "
            "whose template shows calls, or an environment that is played as plain text"
        )
    fitting = [name for name in _formats() if _fits(template, name, prompt, turn, call)]
    remedy = (
        f"set learner.environment.renderer to {' or '.join(map(repr, fitting))}"
        if fitting
        else "no format that is known here reads it; take another model, or play with an agent (learner.environment.agent) that reads calls itself"
    )
    raise ConfigError(
        f"calls of tools would not be read: the chat template of {_name(template)} writes a call of {call.name} as {text!r}, and with "
        f"learner.environment.renderer = {template.renderer!r} {problem}; {remedy}"
    )


def _example(function: dict[str, Any]) -> Call:
    schema = function.get("parameters") or {}
    required, properties = schema.get("required") or [], schema.get("properties") or {}
    return Call(function["name"], {name: EXAMPLES.get(_type(properties.get(name) or {}), "seven") for name in required})


def _type(schema: dict[str, Any]) -> str:
    kind = schema.get("type")
    return kind if isinstance(kind, str) else ""


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
    if read == [call]:
        return None
    return f"it is read as {', '.join(f'{one.name}({one.arguments})' for one in read)}" if read else "no call is read"


def _formats() -> list[str]:
    try:
        from renderers import RendererConfig
    except ModuleNotFoundError:
        return []
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
