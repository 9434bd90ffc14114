"""An agent of pydantic-ai with a tool, unchanged but for where it asks."""

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def play(data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **extra: Any) -> float:
    agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key)))

    @agent.tool_plain
    def add(one: int, other: int) -> int:
        """Add two numbers."""
        return one + other

    result = await agent.run(data["prompt"][-1]["content"])
    return float(result.output == data["answer"])
