"""What a policy says in a conversation, read: text, reasoning, calls of tools. Between the tokens of a turn and talk.py.

The format is the model's own where its tokenizer says it (`response_template`), else that of Hermes, which Qwen's models and many
others have: <think>…</think>, <tool_call>{"name": …, "arguments": …}</tool_call>. transformers parses either.
"""

import json
from typing import TYPE_CHECKING, Any

from learner.environments.host import Call
from learner.prompts.chat_template import ChatTemplate, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENS_REASONING = "<think>"
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


class Unreadable(Exception):
    """A call that cannot be made out; the message says why."""


def read_answer(template: ChatTemplate, prompt: list[int], token_ids: list[int]) -> Message:
    """Return a turn as a message. `prompt`: all that stands before it, for some templates begin it. Raises Unreadable."""
    tokenizer = template.tokenizer
    if getattr(tokenizer, "response_template", None) is None:
        begun = _decoded(tokenizer, prompt[-8:]).rstrip()
        prefix = OPENS_REASONING if begun.endswith(OPENS_REASONING) else ""
        form, ends = HERMES, tokenizer.all_special_ids
        token_ids = token_ids[:-1] if token_ids and token_ids[-1] in ends else token_ids
    else:
        prefix, form = _decoded(tokenizer, prompt), None
    try:
        message = tokenizer.parse_response(
            _decoded(tokenizer, token_ids), form, prefix=prefix, tools=list(template.tools)
        )
    except ValueError as error:
        raise Unreadable(str(error)) from error
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
            arguments = json.loads(arguments)
        except ValueError as error:
            raise Unreadable(f"the arguments of {name} are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise Unreadable(f"the arguments of {name} are {arguments!r}, expected an object")
    return Call(name, arguments)


def _decoded(tokenizer: "PreTrainedTokenizerBase", token_ids: list[int]) -> str:
    (text,) = tokenizer.batch_decode([token_ids], skip_special_tokens=False)
    return text
