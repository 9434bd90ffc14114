"""An agent of openai-agents with a tool, which asks for chat completions."""

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)  # else it would tell OpenAI of every run


@function_tool
def add(one: int, other: int) -> int:
    """Add two numbers."""
    return one + other


async def play(data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **extra: Any) -> float:
    model = OpenAIChatCompletionsModel("policy", AsyncOpenAI(base_url=base_url, api_key=api_key))
    agent = Agent(name="adder", instructions="Add with the tool.", tools=[add], model=model)
    result = await Runner.run(agent, data["prompt"][-1]["content"])
    return float(result.final_output == data["answer"])
