"""The Messages API of the gateway, with the plain anthropic client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("anthropic", reason="needs the package anthropic, which vLLM brings")

import anthropic
from anthropic import AsyncAnthropic

from tests.learner.environments.chat_tokenizer import END, call
from tests.learner.environments.scripted_conversation import QUESTION, script_of
from tests.learner.gateway.scripted_gateway import OpenEpisode, open_episode

pytestmark = pytest.mark.anyio
ADD: Any = {"name": "add", "input_schema": {"type": "object", "properties": {}}, "cache_control": {"type": "ephemeral"}}
TURN = "<think>two</think>Well" + call("add", number=2) + call("add", number=3)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Claude:
    """An open episode and the client of Anthropic."""

    def __init__(self, agent: OpenEpisode, client: AsyncAnthropic) -> None:
        self.agent, self.client = agent, client

    async def say(self, messages: Any = QUESTION, max_tokens: int = 50, **more: Any) -> Any:
        return await self.client.messages.create(model="any", messages=messages, max_tokens=max_tokens, **more)


@asynccontextmanager
async def talking(*turns: str, end: str = END, reason: str = "stop", **more: Any) -> AsyncIterator[Claude]:
    async with open_episode(script_of(*turns, end=end, reason=reason), **more) as agent:
        url = agent.gateway.base_url.removesuffix("/v1")
        async with AsyncAnthropic(base_url=url, api_key=agent.client.api_key, max_retries=0, timeout=60) as client:
            yield Claude(agent, client)


async def test_a_message_has_a_block_for_each_part_of_the_turn() -> None:
    async with talking(TURN) as claude:
        reply = await claude.say(tools=[ADD], system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "it."}])
        (branch,) = claude.agent.end().branches
        assert "<|im_start|>system\nBe it.<|im_end|>" in claude.agent.shown(0)
    thought, said, first, second = reply.content
    assert (thought.thinking, said.text, reply.stop_reason) == ("two", "Well", "tool_use") and thought.signature
    assert [(one.name, one.input) for one in (first, second)] == [("add", {"number": 2}), ("add", {"number": 3})]
    usage = reply.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(claude.agent.prompts[0].token_ids)
    assert usage.output_tokens == len(branch.token_ids)


async def test_a_stream_adds_up_to_the_whole_message() -> None:
    async with talking(TURN, TURN) as claude:
        whole = await claude.say(tools=[ADD])
        async with claude.client.messages.stream(model="any", messages=QUESTION, max_tokens=50, tools=[ADD]) as stream:  # type: ignore[arg-type]
            streamed = await stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, None)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    for block, other in zip(streamed.content, whole.content, strict=True):
        without_ids = {"id", "signature", "parsed_output"}
        assert block.model_dump(exclude=without_ids) == other.model_dump(exclude=without_ids)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
async def test_a_call_with_a_number_that_json_cannot_hold_is_text(number: str) -> None:
    turn = f'<tool_call>{{"name": "add", "arguments": {{"number": {number}}}}}</tool_call>'
    async with talking(turn, turn) as claude:
        whole = await claude.say(tools=[ADD])
        async with claude.client.messages.stream(model="any", messages=QUESTION, max_tokens=50, tools=[ADD]) as stream:  # type: ignore[arg-type]
            streamed = await stream.get_final_message()
    for reply in (whole, streamed):
        assert [block.text for block in reply.content] == [turn] and reply.stop_reason == "end_turn"


async def test_stop_reasons_name_the_stop_sequence_or_the_limit() -> None:
    async with talking("one;", end="") as claude:
        reply = await claude.say(stop_sequences=[".", ";"])
        assert (reply.content[0].text, reply.stop_reason, reply.stop_sequence) == ("one", "stop_sequence", ";")
        assert claude.agent.prompts[0].stop == (".", ";")
    async with talking("one", end="", reason="length") as claude:
        assert (await claude.say(max_tokens=3)).stop_reason == "max_tokens"
    async with talking("one") as claude:
        assert (await claude.say()).stop_reason == "end_turn"


async def test_blocks_of_all_kinds_continue_the_recorded_turn_and_are_counted() -> None:
    async with talking(TURN, "one") as claude:
        first = await claude.say(tools=[ADD])
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "5"}]}
            for block in first.content[2:]
        ]
        then = {"type": "text", "text": "So?"}
        messages: Any = [
            *QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [*results, then]},
        ]  # fmt: skip
        counted = await claude.client.messages.count_tokens(model="any", messages=messages, tools=[ADD])
        await claude.say(messages, tools=[ADD])
        agent = claude.agent
        assert counted.input_tokens == len(agent.prompts[1].token_ids) and len(agent.prompts) == 2
        results_shown = "<|im_start|>tool\n5<|im_end|>\n" * 2 + "<|im_start|>user\nSo?"
        assert TURN + END + "\n" + results_shown in agent.shown(1)
        assert len(agent.end().branches) == 1


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"thinking": {"type": "disabled"}}, "thinking.type = disabled .* learner.data.chat_template_kwargs"),
        ({"output_config": {"effort": "low"}}, "output_config.effort = low"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format of type 'json_schema'"),
        ({"extra_body": {"temperature": 0.7}}, "temperature = 0.7 .* set learner.sampling.temperature"),
        ({"extra_body": {"top_k": 5}}, "top_k = 5"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers = "),
        ({"extra_body": {"container": "c"}}, "container = c"),
        ({"max_tokens": 0}, "max_tokens = 0 must be at least 1"),
        ({"stop_sequences": [""]}, "stop_sequences = "),
        ({"tools": [{"type": "web_search_20260101", "name": "web_search"}]}, r"tools\[0\] has type 'web_search_20260101'"),
        ({"tools": [ADD], "tool_choice": {"type": "any"}}, "tool_choice = .*expected type 'auto' or 'none'"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "It"}]}, "messages ends with a message of the assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            r"messages\[0\].content\[0\] has type 'image', expected 'text' or 'tool_result'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x",
            "content": [{"type": "image"}]}]}]}, r"messages\[0\].content\[0\] has parts that are not text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, *QUESTION]},
            "has type 'redacted_thinking'"),
        ({"messages": "hello"}, "the body is not a valid request for the Messages API"),
    ],
)  # fmt: skip
async def test_unsupported_requests_are_rejected_with_the_field(more: dict[str, Any], problem: str) -> None:
    async with talking("one") as claude:
        with pytest.raises(anthropic.BadRequestError, match=problem) as refused:
            await claude.say(**more)
        assert refused.value.body["error"]["type"] == "invalid_request_error" and claude.agent.prompts == []  # type: ignore[index]


async def test_what_changes_no_token_is_accepted_and_forced_forms_can_be_overridden() -> None:
    async with talking("one", "two", "three", override_sampling=True) as claude:
        await claude.say(thinking={"type": "adaptive"}, metadata={"user_id": "me"}, service_tier="auto")
        await claude.say(tools=[ADD], tool_choice={"type": "tool", "name": "add"}, extra_body={"temperature": 0.1})
        await claude.say(tools=[ADD], tool_choice={"type": "none"})
        assert ["add" in claude.agent.shown(number) for number in range(3)] == [False, True, False]


async def test_keys_and_endings_are_reported_as_by_anthropic() -> None:
    async with talking("one") as claude:
        async with AsyncAnthropic(base_url=claude.client.base_url, api_key="sk-0", max_retries=0) as stranger:
            with pytest.raises(anthropic.AuthenticationError, match="the API key belongs to no episode"):
                await stranger.messages.count_tokens(model="any", messages=QUESTION)  # type: ignore[arg-type]
        async with AsyncAnthropic(
            base_url=claude.client.base_url, auth_token=claude.client.api_key, max_retries=0
        ) as with_token:
            assert (await with_token.messages.create(model="any", messages=QUESTION, max_tokens=5)).content  # type: ignore[arg-type]
        claude.agent.session.end(1.0)
        with pytest.raises(anthropic.APIStatusError, match=r"the episode is over \(finished\)") as over:
            await claude.say()
        assert over.value.status_code == 410
