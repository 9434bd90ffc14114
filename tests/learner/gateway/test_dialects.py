"""The dialects of the gateway: the same tokens in each, signs of life, and errors in their own forms.

The clients are the plain ones of OpenAI and Anthropic. Others are in test_real_clients.py.
"""

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("anthropic", reason="needs the package anthropic, which vLLM brings")

import anthropic
import openai
from anthropic import AsyncAnthropic

from learner.environments.episode import Episode
from learner.environments.player import TurnPrompt
from learner.prompts.chat_template import ChatTemplate
from protocol.messages import Completion
from tests.learner.environments.chat_tokenizer import DROPPING, KEEPING, call, chat_tokenizer
from tests.learner.environments.scripted_conversation import QUESTION, script_of
from tests.learner.gateway.real_clients import CLIENTS, run
from tests.learner.gateway.scripted_gateway import FirstTurnPolicy, OpenEpisode, open_episode
from tests.waiting import until_in_loop

pytestmark = pytest.mark.anyio

TURNS = ("<think>plan</think>I add." + call("add", left=17, right=25), "It is 42")
WITH_SCHEMAS = {
    name: text.replace("{{ tool.function.name }}", "{{ tool | tojson }}")
    for name, text in (("keeps", KEEPING), ("drops", DROPPING))
}
PLAIN = [one for one in CLIENTS if one[0] in ("openai", "anthropic")]
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": QUESTION},
    "/completions": {"prompt": "How much?"},
    "/responses": {"input": "How much?"},
    "/messages": {"messages": QUESTION, "max_tokens": 9},
}
"""A request in each dialect, by its path."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def claude(agent: OpenEpisode) -> AsyncAnthropic:
    url = agent.gateway.base_url.removesuffix("/v1")
    return AsyncAnthropic(base_url=url, api_key=agent.client.api_key, max_retries=0, timeout=60)


async def played(client: str, dialect: str, template: str, *, is_stream: bool) -> tuple[Episode, list[list[int]]]:
    """Play the task of `real_clients`. Return the episode and the prompts of its turns."""
    with_schemas = ChatTemplate(chat_tokenizer(WITH_SCHEMAS[template]), {}, [])
    async with open_episode(script_of(*TURNS), template=with_schemas) as agent:
        row = {"client": client, "dialect": dialect, "stream": is_stream}
        assert await run(row, base_url=agent.gateway.base_url, api_key=agent.client.api_key) == 1.0
        return agent.end(), [prompt.token_ids.tolist() for prompt in agent.prompts]


@pytest.mark.parametrize("template", WITH_SCHEMAS)
async def test_a_turn_has_the_same_tokens_in_each_dialect_with_and_without_a_stream(template: str) -> None:
    expected, prompts = await played("openai", "chat", template, is_stream=False)
    assert expected.stats.num_calls == 1 and len(expected.branches) == (1 if template == "keeps" else 2)
    for client, dialect in PLAIN:
        for is_stream in (False, True):
            episode, its_prompts = await played(client, dialect, template, is_stream=is_stream)
            assert its_prompts == prompts, (dialect, is_stream)
            assert len(episode.branches) == len(expected.branches)
            for branch, other in zip(episode.branches, expected.branches, strict=True):
                assert branch.token_ids.tolist() == other.token_ids.tolist()
                np.testing.assert_array_equal(branch.behavior_logprobs, other.behavior_logprobs)
                assert branch.versions == other.versions
            without_ids = [
                [{key: one[key] for key in ("role", "content")} for one in each.messages]
                for each in (episode, expected)
            ]
            assert without_ids[0] == without_ids[1]


@pytest.mark.parametrize("path", BODIES)
async def test_an_agent_gets_signs_of_life_until_its_turn_is_complete(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.gateway.streams.KEEP_ALIVE_S", 0.02)
    lively = asyncio.Event()

    async def policy(turn: TurnPrompt) -> Completion:
        await lively.wait()
        return script_of("Five")(turn)

    async with open_episode(policy) as agent, httpx.AsyncClient(timeout=60) as http:
        headers = {"Authorization": f"Bearer {agent.client.api_key}"}
        body = {"model": "policy", "stream": True, **BODIES[path]}
        async with http.stream("POST", agent.gateway.base_url + path, headers=headers, json=body) as answer:
            lines = []
            async for line in answer.aiter_lines():
                lines.append(line)
                if sum("ping" in one or one.startswith(":") for one in lines) == 4:
                    lively.set()
        assert "Five" in "".join(lines) and answer.status_code == 200
        assert len(agent.end().branches) == 1


async def no_server(turn: TurnPrompt) -> None:
    await asyncio.sleep(0.2)


async def test_an_error_after_a_sign_of_life_raises_in_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.gateway.streams.KEEP_ALIVE_S", 0.02)
    async with open_episode(no_server) as agent, claude(agent) as other:
        asked: dict[str, Any] = {"model": "policy", "stream": True}
        for ask in (
            agent.client.chat.completions.create(messages=QUESTION, **asked),
            agent.client.completions.create(prompt="x", **asked),
            agent.client.responses.create(input="x", **asked),
        ):
            with pytest.raises(openai.APIError, match="no server could answer"):
                async for _ in await ask:
                    pass
        with pytest.raises(anthropic.APIError, match="no server could answer"):
            async for _ in await other.messages.create(messages=QUESTION, max_tokens=9, **asked):
                pass
        assert agent.end().stats.state == "aborted"


@pytest.mark.parametrize("path", BODIES)
async def test_a_turn_whose_stream_is_given_up_is_canceled(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.gateway.streams.KEEP_ALIVE_S", 0.02)
    async with open_episode(policy := FirstTurnPolicy()) as agent, httpx.AsyncClient(timeout=60) as http:
        headers = {"x-api-key": agent.client.api_key}
        asked: dict[str, Any] = {"url": agent.gateway.base_url + path, "headers": headers}
        await http.post(json=BODIES[path], **asked)
        async with http.stream("POST", json={**BODIES[path], "stream": True}, **asked) as answer:
            async for _ in answer.aiter_lines():
                await until_in_loop(lambda: policy.num_held == 1)  # the stream begins before its turn
                break
        await until_in_loop(lambda: policy.num_given_up == 1)
        assert agent.end().stats.num_turns == 1


async def test_errors_have_the_form_and_the_status_of_each_dialect() -> None:
    async with open_episode(script_of("one"), max_turns=1) as agent, httpx.AsyncClient(timeout=60) as http:

        async def error_of(path: str, body: dict[str, Any], key: str) -> tuple[int, dict[str, Any]]:
            answer = await http.post(agent.gateway.base_url + path, headers={"x-api-key": key}, json=body)
            assert answer.headers["x-should-retry"] == "false"
            return answer.status_code, answer.json()

        key = agent.client.api_key
        await agent.chat(QUESTION)
        for stream in (False, True):
            for path, body in BODIES.items():
                for status, kind, more, its_key in (
                    (400, "invalid_request_error", {"temperature": 0.5}, key),
                    (401, "authentication_error" if path == "/messages" else "invalid_api_key", {}, "sk-0"),
                    (410, "invalid_request_error" if path == "/messages" else "max_turns", {}, key),
                ):
                    found, error = await error_of(path, {**body, **more, "stream": stream}, its_key)
                    assert (found, error["error"]["type"]) == (status, kind), path
                    if path == "/messages":
                        assert error["type"] == "error" and "param" not in error["error"]
                    elif status == 400:
                        assert error["error"]["param"] == "temperature"
        found, error = await error_of("/v1/messages", {}, key)
        assert found == 404 and "before /v1 for those of Anthropic" in error["error"]["message"]
