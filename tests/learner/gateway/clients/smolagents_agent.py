"""An agent of smolagents with a tool. It is not asynchronous, and forces its calls: override_sampling leaves that out."""

from typing import Any

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(one: int, other: int) -> int:
    """Add two numbers.

    Args:
        one: the first
        other: the second
    """
    return one + other


def play(data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **extra: Any) -> float:
    model = OpenAIServerModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(tools=[add], model=model, max_steps=3)
    return float(str(agent.run(data["prompt"][-1]["content"])) == data["answer"])
