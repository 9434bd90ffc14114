"""Tool-call formats: how a call is read, and which runs must not start because their template writes another format."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.config import LearnerRun
from learner.environments.answer import HERMES, UnreadableAnswer, check_calls, read_answer, renderer_of
from learner.prompts.chat_template import ChatTemplate
from learner.run_inputs import RunInputs
from protocol.errors import ConfigError
from tests.learner.environments.chat_model import write_model
from tests.learner.environments.chat_tokenizer import KEEPING, chat_tokenizer
from tests.learner.environments.scripted_conversation import calculator_tools, template
from tests.learner.environments.scripted_player import USER
from tests.learner.environments.template_families import ADD, FAMILIES, QUESTION, TOOLS, chat_of, encoded

HERMES_CALL = "<tool_call>{{ call.function | tojson }}</tool_call>"
LLAMA_CALL = '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'


def writing(call: str) -> ChatTemplate:
    return ChatTemplate(chat_tokenizer(KEEPING.replace(HERMES_CALL, call)), {}, calculator_tools())


def with_format(of: ChatTemplate, name: str | None) -> ChatTemplate:
    return msgspec.structs.replace(of, turns=msgspec.structs.replace(of.turns, renderer=name))


def test_a_call_of_an_unknown_tool_is_readable_but_a_truncated_call_is_not() -> None:
    spoken = chat_of("glm4.5", TOOLS)
    before, turn = spoken.prompt_ids(QUESTION), FAMILIES["glm4.5"].write_turn(calls=[ADD])
    message = read_answer(spoken, before, encoded(spoken, turn.replace("add", "subtract")))
    assert message["tool_calls"][0]["function"] == {"name": "subtract", "arguments": {"number": 2}}
    hermes = with_format(chat_of("qwen3", TOOLS), "qwen3")
    with pytest.raises(UnreadableAnswer, match=r"is not a valid call \(invalid_json\)"):
        read_answer(hermes, before, encoded(hermes, '<tool_call>\n{"name": "add", "arguments"\n</tool_call><|im_end|>'))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("qwen-9", "Known: .*glm-4.5"),
        ("auto", "is not a format; set it to one"),
        ("glm-4.5", r"does not fit the tokenizer.*\[gMASK\].*set it to the format"),
    ],
)
def test_an_unknown_or_unfitting_format_is_rejected_at_the_start(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"learner.environment.tool_call_format = '{name}'.*{problem}"):
        renderer_of(chat_tokenizer(), name)


def test_hermes_calls_are_read_back_and_a_run_without_tools_is_not_checked() -> None:
    check_calls(template(KEEPING, opens_reasoning=True))
    check_calls(ChatTemplate(chat_tokenizer("no template"), {}, []))


@pytest.mark.parametrize(
    ("family", "name", "problem"),
    [
        ("llama3", "llama-3", "no call is found; set that key to 'llama-3'"),
        ("qwen3.5", "qwen3.5", r"it cannot be parsed .*; set that key to .*'qwen3.5'"),
    ],
)
def test_a_template_with_another_format_is_rejected_with_the_fitting_formats(
    family: str, name: str, problem: str
) -> None:
    spoken = chat_of(family, TOOLS)
    with pytest.raises(
        ConfigError,
        match=rf"(?s)writes a call of add as .*, but with learner.environment.tool_call_format = None {problem}",
    ):
        check_calls(with_format(spoken, None))
    check_calls(with_format(spoken, name))


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("[[{{ call.function.name }}]]", r"no call is found; none of the tested formats reads it .*; set that key to "
        r"another format, use another model"),
        ("{{ raise_exception('no tools here') }}",
            r"the policy cannot call tools: .* cannot render a message with a call: .*no tools here"),
    ],
)  # fmt: skip
def test_a_template_with_an_unknown_format_is_rejected(call: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_calls(writing(call))


def test_the_tokenizers_format_takes_precedence() -> None:
    spoken = writing("[[{{ call.function | tojson }}]]")
    fields: dict[str, Any] = {
        "tool_calls": HERMES["fields"]["tool_calls"] | {"open": "[[", "close_pattern": r"\]\]"},  # type: ignore[index]
        "content": {"close_pattern": r"<\|im_end\|>"},
    }
    spoken.tokenizer.response_template = {  # type: ignore[attr-defined]
        "defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields,
    }  # fmt: skip
    check_calls(spoken)
    text = read_answer(spoken, spoken.prompt_ids(QUESTION), encoded(spoken, "<tool_call> is text here<|im_end|>"))
    assert not text.get("tool_calls") and text["content"] == "<tool_call> is text here"


def test_a_template_that_omits_calls_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    check_calls(writing(""))
    assert "does not render calls: one of add is '<|im_end|>'" in caplog.text


@pytest.mark.parametrize(
    "schema", [{"type": "boolean"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}, {}], ids=str
)
def test_argument_syntax_of_a_template_is_no_reason_to_reject_it(schema: dict[str, Any]) -> None:
    parameters = {
        "type": "object", "properties": {"value": schema, "name": {"type": "string"}}, "required": ["value", "name"],
    }  # fmt: skip
    check_calls(chat_of("qwen3.5", [{"type": "function", "function": {"name": "set", "parameters": parameters}}]))


def test_a_missing_package_of_formats_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    with pytest.raises(ConfigError, match=r"the package renderers has more formats: .*pip install .*\[renderers\]"):
        check_calls(writing(LLAMA_CALL))


def test_a_run_uses_the_end_tokens_of_its_model_and_does_not_start_with_unreadable_calls(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": QUESTION}) + "\n")
    settings = {
        "steps": 1, "data": {"path": str(data)}, "reward": {"functions": ["environment_reward"]},
        "environment": {"factory": f"{USER}:Calculator"},
    }  # fmt: skip
    run = msgspec.convert({"model": str(tmp_path), "run_dir": "runs/x", "learner": settings}, LearnerRun)
    write_model(tmp_path, KEEPING, HERMES)
    own = chat_tokenizer().eos_token_id
    assert RunInputs(run).prompts.template.ends == {own}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert RunInputs(run).prompts.template.ends == {5, 7, own}
    write_model(tmp_path, KEEPING.replace(HERMES_CALL, LLAMA_CALL), HERMES)
    with pytest.raises(ConfigError, match="tool calls would be unreadable"):
        _ = RunInputs(run).prompts
