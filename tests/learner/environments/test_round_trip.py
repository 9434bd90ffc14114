"""At the start of a run: whether the calls that a chat template writes are read, and what is said if not."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.config import LearnerRun
from learner.environments.answer import HERMES, check_calls
from learner.prompts.chat_template import ChatTemplate, TurnFormat
from learner.run_inputs import RunInputs
from protocol.errors import ConfigError
from tests.learner.environments.chat_model import write_model
from tests.learner.environments.chat_tokenizer import DROPPING, END, KEEPING, chat_tokenizer
from tests.learner.environments.play import USER
from tests.learner.environments.test_conversations import template
from tests.learner.environments.test_renderers import TOKENS

HERMES_CALL = "<tool_call>{{ call.function | tojson }}</tool_call>"
LLAMA_CALL = '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
XML_CALL = (
    "<tool_call>\n<function={{ call.function.name }}>\n{% for name, value in call.function.arguments.items() %}<parameter={{ name }}>\n"
    "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)


def writing(call: str, family: str | None = None, renderer: str | None = None) -> ChatTemplate:
    end = "<|eot_id|>" if family == "llama-3" else END
    tokenizer = chat_tokenizer(KEEPING.replace(HERMES_CALL, call).replace(END, end))
    if family is not None:
        tokenizer.add_tokens(TOKENS[family].split(), special_tokens=True)
    return ChatTemplate(tokenizer, {}, template().tools, TurnFormat(renderer))


@pytest.mark.parametrize("text", [KEEPING, DROPPING])
def test_calls_in_the_format_of_hermes_come_back(text: str) -> None:
    check_calls(template(text))
    check_calls(template(text, opens_reasoning=True))


def test_a_template_without_tools_to_tell_of_is_not_asked() -> None:
    check_calls(ChatTemplate(chat_tokenizer("no template"), {}, []))


@pytest.mark.parametrize(
    ("call", "family", "told"),
    [
        (LLAMA_CALL, "llama-3", "no call is found; set that key to 'llama-3'"),
        (XML_CALL, "qwen3.5", r"it cannot be parsed .*; set that key to .*'qwen3.5'"),
    ],
)
def test_calls_in_another_format_are_refused_with_those_that_fit(call: str, family: str, told: str) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"(?s)writes a call of add as .*, but with learner.environment.tool_call_format = None {told}",
    ):
        check_calls(writing(call, family))
    check_calls(writing(call, family, renderer=family))


def test_calls_in_no_known_format_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no call is found; none of the tested formats reads it .*; set that key to another format, use another model",
    ):
        check_calls(writing("[[{{ call.function.name }}]]"))


def test_a_format_that_the_tokenizer_says_counts() -> None:
    spoken = writing("[[{{ call.function | tojson }}]]")
    fields: dict[str, Any] = {
        "tool_calls": HERMES["fields"]["tool_calls"] | {"open": "[[", "close_pattern": r"\]\]"},  # type: ignore[index]
    }
    spoken.tokenizer.response_template = {  # type: ignore[attr-defined]
        "defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields,
    }  # fmt: skip
    check_calls(spoken)


def test_a_template_that_shows_no_calls_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    check_calls(writing(""))
    assert "does not render calls: one of add is '<|im_end|>'" in caplog.text


@pytest.mark.parametrize(
    "schema",
    [{"type": "boolean"}, {"type": ["integer", "number"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, {}],
    ids=str,
)
def test_arguments_that_templates_write_in_their_own_way_say_nothing(schema: dict[str, Any]) -> None:
    spoken = writing(XML_CALL, "qwen3.5", "qwen3.5")
    parameters = {
        "type": "object",
        "properties": {"value": schema, "name": {"type": "string"}},
        "required": ["value", "name"],
    }
    tools = [{"type": "function", "function": {"name": "set", "parameters": parameters}}]
    check_calls(msgspec.structs.replace(spoken, tools=tools))


def test_a_missing_package_of_formats_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ConfigError, match=r"the package renderers has more formats: .*pip install .*\[renderers\]"):
        check_calls(writing(LLAMA_CALL, "llama-3"))


def test_a_template_that_raises_at_calls_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"the policy cannot call tools: .* cannot render a message with a call: .*no tools here"
    ):
        check_calls(writing("{{ raise_exception('no tools here') }}"))


def test_a_run_whose_calls_would_not_be_read_does_not_begin(tmp_path: Path) -> None:
    write_model(tmp_path, KEEPING.replace(HERMES_CALL, LLAMA_CALL), HERMES)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": [{"role": "user", "content": "How much?"}]}) + "\n")
    settings = {
        "steps": 1, "data": {"path": str(data)}, "reward": {"functions": ["environment_reward"]},
        "environment": {"factory": f"{USER}:Calculator"},
    }  # fmt: skip
    run = msgspec.convert({"model": str(tmp_path), "run_dir": "runs/x", "learner": settings}, LearnerRun)
    with pytest.raises(ConfigError, match="tool calls would be unreadable"):
        _ = RunInputs(run).prompts
