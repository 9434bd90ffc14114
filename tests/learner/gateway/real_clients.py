"""One task for the clients of many libraries: add two numbers with a tool, in two turns of the policy. A coding harness
repairs a file instead.

The file is an agent. It imports nothing of Slipstream and only the library of the row's client, so that it runs in any
interpreter. Each client speaks each dialect that it has, as its users would.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

SYSTEM, QUESTION = "Use the tool.", "How much is 17 and 25?"
SCHEMA = {
    "type": "object", "properties": {"left": {"type": "integer"}, "right": {"type": "integer"}},
    "required": ["left", "right"],
}  # fmt: skip
TOOL = {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}
MAX_TOKENS = 100

Client = Callable[..., Awaitable[str]]
CLIENTS: dict[tuple[str, str], Client] = {}
"""Clients by library and dialect. Each returns the policy's last text."""


def client(library: str, dialect: str) -> Callable[[Client], Client]:
    def add_client(play: Client) -> Client:
        CLIENTS[library, dialect] = play
        return play

    return add_client


async def run(data: dict[str, Any], *, base_url: str, api_key: str, **extra: Any) -> float:
    """Play one row. The reward is 1 if the policy's last text has the sum."""
    play = CLIENTS[data["client"], data["dialect"]]
    url = base_url.removesuffix("/v1") if data["dialect"] == "messages" else base_url
    return float("42" in await play(url, api_key, is_stream=data["stream"]))


def add(left: int, right: int) -> str:
    """Add two numbers."""
    return str(left + right)


# --- openai and anthropic -------------------------------------------------------------------------------------------
@client("openai", "chat")
async def openai_chat(url: str, key: str, *, is_stream: bool) -> str:
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"type": "function", "function": TOOL}]
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as api:
        while True:
            if is_stream:
                async with api.chat.completions.stream(model="policy", messages=messages, tools=tools) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                reply = await api.chat.completions.create(model="policy", messages=messages, tools=tools)
                message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                result = add(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@client("openai", "responses")
async def openai_responses(url: str, key: str, *, is_stream: bool) -> str:
    from openai import AsyncOpenAI

    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"type": "function", **TOOL, "strict": True}]  # the API's default
    asked: dict[str, Any] = {"model": "policy", "instructions": SYSTEM, "tools": tools, "max_output_tokens": MAX_TOKENS}
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as api:
        while True:
            if is_stream:
                async with api.responses.stream(input=items, **asked) as stream:
                    async for _ in stream:
                        pass
                    reply = await stream.get_final_response()
            else:
                reply = await api.responses.create(input=items, **asked)
            items += [item.model_dump(exclude_none=True) for item in reply.output]
            calls = [item for item in reply.output if item.type == "function_call"]
            if not calls:
                return reply.output_text
            for call in calls:
                result = add(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


@client("anthropic", "messages")
async def anthropic_messages(url: str, key: str, *, is_stream: bool) -> str:
    from anthropic import AsyncAnthropic

    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    tool: Any = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": "policy", "system": SYSTEM, "tools": [tool], "max_tokens": MAX_TOKENS}
    async with AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as api:
        while True:
            if is_stream:
                async with api.messages.stream(messages=messages, **asked) as stream:
                    message = await stream.get_final_message()
            else:
                message = await api.messages.create(messages=messages, **asked)
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in message.content if block.type == "text")
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": add(**call.input)}  # type: ignore[arg-type]
                for call in calls
            ]
            messages.append({"role": "user", "content": results})


# --- openai-agents --------------------------------------------------------------------------------------------------
@client("openai-agents", "chat")
async def agents_chat(url: str, key: str, *, is_stream: bool) -> str:
    from agents import OpenAIChatCompletionsModel

    return await _run_agents_sdk(OpenAIChatCompletionsModel, url, key, is_stream)


@client("openai-agents", "responses")
async def agents_responses(url: str, key: str, *, is_stream: bool) -> str:
    from agents import OpenAIResponsesModel

    return await _run_agents_sdk(OpenAIResponsesModel, url, key, is_stream)


async def _run_agents_sdk(model_class: Any, url: str, key: str, is_stream: bool) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as api:
        model = model_class(model="policy", openai_client=api)
        agent = Agent(name="adder", instructions=SYSTEM, tools=[function_tool(add)], model=model)
        if not is_stream:
            return (await Runner.run(agent, QUESTION)).final_output
        result = Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output


# --- pydantic-ai ----------------------------------------------------------------------------------------------------
@client("pydantic-ai", "chat")
async def pydantic_chat(url: str, key: str, *, is_stream: bool) -> str:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return await _run_pydantic(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=url, api_key=key)), is_stream)


@client("pydantic-ai", "responses")
async def pydantic_responses(url: str, key: str, *, is_stream: bool) -> str:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIResponsesModel("policy", provider=OpenAIProvider(base_url=url, api_key=key))
    return await _run_pydantic(model, is_stream)


@client("pydantic-ai", "messages")
async def pydantic_messages(url: str, key: str, *, is_stream: bool) -> str:
    from anthropic import AsyncAnthropic
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    api = AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
    return await _run_pydantic(AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=api)), is_stream)


async def _run_pydantic(model: Any, is_stream: bool) -> str:
    from pydantic_ai import Agent

    async def read_events(context: Any, events: Any) -> None:  # with a reader of events, requests are streams
        async for _ in events:
            pass

    agent = Agent(model, instructions=SYSTEM)
    agent.tool_plain(add)
    return (await agent.run(QUESTION, event_stream_handler=read_events if is_stream else None)).output


# --- langchain ------------------------------------------------------------------------------------------------------
@client("langchain", "chat")
async def langchain_chat(url: str, key: str, *, is_stream: bool) -> str:
    from langchain_openai import ChatOpenAI

    return await _run_langchain(ChatOpenAI(model="policy", base_url=url, api_key=key, max_retries=0), is_stream)


@client("langchain", "responses")
async def langchain_responses(url: str, key: str, *, is_stream: bool) -> str:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="policy", base_url=url, api_key=key, max_retries=0, use_responses_api=True)
    return await _run_langchain(model, is_stream)


@client("langchain", "messages")
async def langchain_messages(url: str, key: str, *, is_stream: bool) -> str:
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model="policy", base_url=url, api_key=key, max_retries=0, max_tokens=MAX_TOKENS)
    return await _run_langchain(model, is_stream)


async def _run_langchain(model: Any, is_stream: bool) -> str:
    from langchain.agents import create_agent

    agent = create_agent(model, [add], system_prompt=SYSTEM)
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    if not is_stream:
        return (await agent.ainvoke(asked))["messages"][-1].text
    texts = ""
    async for chunk, _ in agent.astream(asked, stream_mode="messages"):
        texts += chunk.text
    return texts


# --- mini-swe-agent -------------------------------------------------------------------------------------------------
@client("mini-swe-agent", "chat")
async def mini_chat(url: str, key: str, *, is_stream: bool) -> str:
    return _run_mini("litellm", "openai/policy", url, key)


@client("mini-swe-agent", "responses")
async def mini_responses(url: str, key: str, *, is_stream: bool) -> str:
    return _run_mini("litellm_response", "openai/policy", url, key)


@client("mini-swe-agent", "messages")
async def mini_messages(url: str, key: str, *, is_stream: bool) -> str:
    return _run_mini("litellm", "anthropic/policy", url, key)


def _run_mini(model_class: str, name: str, url: str, key: str) -> str:
    """Return what the file prints that the policy repairs. The harness has no streams."""
    os.environ |= {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
    }  # fmt: skip
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models import get_model

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "answer.sh").write_text("echo 41\n")
        given = {"model_class": model_class, "model_kwargs": {"api_base": url, "api_key": key, "max_retries": 0}}
        agent = DefaultAgent(
            get_model(name, given), LocalEnvironment(cwd=folder), system_template=SYSTEM, instance_template="{{task}}",
            step_limit=4,
        )  # fmt: skip
        assert agent.run("answer.sh prints 41. Let it print 42.")["exit_status"] == "Submitted"
        return subprocess.check_output(["sh", "answer.sh"], cwd=folder, text=True)
