"""Agents of public libraries, each in its own environment: two turns with a tool, one branch unless the library rewrites a turn."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.agents import says
from tests.learner.environments.chat_tokenizer import call
from tests.learner.gateway.asking import played_by_agent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CLIENTS = Path(__file__).parent / "clients"
QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
ADDS = call("add", one=3, other=4)


@pytest.mark.parametrize(
    ("name", "packages", "then_says", "role", "num_branches"),
    [
        ("pydantic_ai", ["pydantic-ai-slim[openai]"], "7", "tool", 1),
        ("openai_agents", ["openai-agents"], "7", "tool", 1),
        (
            "smolagents",
            ["smolagents[openai]"],
            call("final_answer", answer="7"),
            "user",
            2,
        ),  # it rewrites the call that it got
    ],
)
def test_an_agent_of_a_library_calls_its_tool_and_goes_on(
    interpreter: Callable[..., str], name: str, packages: list[str], then_says: str, role: str, num_branches: int
) -> None:
    python = interpreter(*packages)
    for last, reward in ((then_says, 1.0), (then_says.replace("7", "8"), 0.0)):
        group = played_by_agent(
            {"answer": "7", "prompt": QUESTION}, QUESTION, says(ADDS, last), agent=f"{CLIENTS / name}_agent.py:play",
            python=python, override_sampling=name == "smolagents",
        )  # fmt: skip
        assert [episode.reward for episode in group.episodes] == [reward] * 2, [one.course for one in group.episodes]
        for episode in group.episodes:
            assert [message["role"] for message in episode.messages] == ["assistant", role, "assistant"]
            assert episode.course.num_turns == 2 and len(episode.branches) == num_branches
