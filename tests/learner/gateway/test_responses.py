"""The Responses API of the gateway, with the plain openai client."""

from typing import Any

import openai
import pytest

from tests.learner.environments.chat_tokenizer import END, call
from tests.learner.environments.scripted_conversation import script_of
from tests.learner.gateway.scripted_gateway import OpenEpisode, open_episode

pytestmark = pytest.mark.anyio
ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True}
TURN = "<think>two</think>Well" + call("add", number=2) + call("add", number=3)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def respond(agent: OpenEpisode, given: Any = "How much?", **more: Any) -> Any:
    return await agent.client.responses.create(model="any", input=given, **more)


async def test_a_response_has_an_item_for_each_part_of_the_turn() -> None:
    async with open_episode(script_of(TURN)) as agent:
        reply = await respond(agent, tools=[ADD], instructions="Add.", metadata={"number": "3"})
        (branch,) = agent.end().branches
    thought, said, first, second = reply.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "two") and reply.output_text == "Well"
    assert said.status == reply.status == "completed"
    assert [(one.name, one.arguments) for one in (first, second)] == [
        ("add", '{"number": 2}'),
        ("add", '{"number": 3}'),
    ]
    assert first.call_id != second.call_id
    assert (reply.instructions, reply.metadata, reply.store) == ("Add.", {"number": "3"}, False)
    usage, num_prompt = reply.usage, len(agent.prompts[0].token_ids)
    assert (usage.input_tokens, usage.output_tokens) == (num_prompt, len(branch.token_ids))
    assert usage.output_tokens_details.reasoning_tokens == len("two")


def without_ids(value: Any) -> Any:
    """Return a reply without what differs between two replies to the same request."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        return {key: without_ids(one) for key, one in value.items() if key not in ("id", "call_id", "created_at")}
    return value


async def test_a_stream_ends_with_the_response_that_its_events_add_up_to() -> None:
    async with open_episode(script_of(TURN, TURN, TURN)) as agent:
        whole = await respond(agent, tools=[ADD])
        events = [event async for event in await respond(agent, tools=[ADD], stream=True)]
        async with agent.client.responses.stream(model="any", input="How much?", tools=[ADD]) as stream:
            summed = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created", "response.in_progress", "response.output_item.added",
    ]  # fmt: skip
    done = [event.item for event in events if event.type == "response.output_item.done"]
    last = events[-1]
    assert last.type == "response.completed" and done == last.response.output
    assert [event.delta for event in events if event.type.endswith(".delta")] == [
        "two", "Well", '{"number": 2}', '{"number": 3}',
    ]  # fmt: skip
    usage = {"usage"}  # a later turn has more cached tokens
    one, other = (without_ids(reply.model_dump(exclude=usage)) for reply in (whole, last.response))
    assert one == other and summed.output_text == whole.output_text


async def test_a_truncated_response_is_incomplete() -> None:
    async with open_episode(script_of("one", "two", reason="length", end="")) as agent:
        reply = await respond(agent, max_output_tokens=3)
        assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert agent.prompts[0].max_tokens == 3
        events = [event.type async for event in await respond(agent, stream=True)]
        assert events[-1] == "response.incomplete"


async def test_items_of_all_kinds_continue_the_recorded_turn() -> None:
    async with open_episode(script_of(TURN, "one", "two")) as agent:
        first = await respond(agent, tools=[ADD])
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "How much?"}]}]
        items += [item.to_dict() for item in first.output if item.type != "reasoning"]  # it may be left out
        for item in first.output[2:]:
            output: Any = [{"type": "input_text", "text": "5"}]
            items.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
        await respond(agent, items, tools=[ADD])
        await respond(agent, [*items, {"role": "assistant", "content": "one"}, {"role": "user", "content": "So?"}],
                      tools=[ADD])  # fmt: skip
        shown = agent.shown(2)
        assert TURN + END + "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>tool\n5" in shown
        assert shown.endswith("assistant\none<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n")
        assert len(agent.end().branches) == 1


async def test_assistant_messages_in_sequence_stay_apart() -> None:
    async with open_episode(script_of("one", "two")) as agent:
        said = [{"role": "assistant", "content": text} for text in ("A", "B")]
        await respond(agent, [{"role": "developer", "content": "Short."}, *said, {"role": "user", "content": "C"}])
        assert agent.shown(0).count("<|im_start|>assistant") == 3 and "<|im_start|>system\nShort." in agent.shown(0)
        thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "why"}]}
        await respond(agent, [said[0], thought, said[1]])
        assert "A<|im_end|>\n<|im_start|>assistant\n<think>why</think>B" in agent.shown(1)


@pytest.mark.parametrize(
    ("more", "parameter", "problem"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
        ({"conversation": "conv_1"}, "conversation", "send the whole conversation as input"),
        ({"prompt": {"id": "p"}}, "prompt", "stores no prompts"),
        ({"background": True}, "background", "with stream = true"),
        ({"truncation": "auto"}, "truncation", "expected 'disabled'"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "learner.data.chat_template_kwargs"),
        ({"text": {"format": "json"}}, "text.format", "'json' is not supported"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format", "'json_object' is not supported"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "ask for it in the messages"),
        ({"temperature": 0.7}, "temperature", "set learner.sampling.temperature"),
        ({"top_logprobs": 3}, "top_logprobs", "expected 0"),
        ({"include": ["message.output_text.logprobs"]}, "include", "use chat completions"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"tools": [{"type": "web_search"}]}, r"tools[0]", "type 'web_search'"),
        ({"tools": [{"type": "custom", "name": "x"}]}, r"tools[0]", "type 'custom'"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice", "expected 'auto' or 'none'"),
        ({"given": []}, "input", "input is empty"),
        ({"given": [{"type": "item_reference", "id": "x"}]}, "input", r"input\[0\] has type 'item_reference'"),
        ({"given": [{"type": "web_search_call", "id": "x"}]}, "input", r"input\[0\] has type 'web_search_call'"),
        ({"given": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input",
            r"input\[0\] has parts that are not text"),
        ({"given": [{"type": "function_call", "call_id": "x", "arguments": "{}"}]}, "input", "without a function name"),
    ],
)  # fmt: skip
async def test_unsupported_requests_are_rejected_with_the_field(
    more: dict[str, Any], parameter: str, problem: str
) -> None:
    async with open_episode(script_of("one")) as agent:
        with pytest.raises(openai.BadRequestError, match=problem) as refused:
            await respond(agent, **more)
        assert refused.value.param == parameter and agent.prompts == []


async def test_what_changes_no_token_is_accepted_and_forced_forms_can_be_overridden() -> None:
    async with open_episode(script_of("one", "two"), override_sampling=True) as agent:
        await respond(
            agent, store=True, user="me", parallel_tool_calls=False, reasoning={"summary": "auto"},
            text={"format": {"type": "text"}}, include=["reasoning.encrypted_content"], service_tier="auto",
        )  # fmt: skip
        forced: Any = {"tools": [ADD], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}
        await respond(agent, temperature=0.1, **forced)
        assert "add" in agent.shown(1)
