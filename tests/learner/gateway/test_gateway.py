"""The plain openai client at the gateway: the requests to the servers and the recorded tokens."""

import asyncio
import json
import re
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI

from learner.environments.episode import EpisodeGroup
from learner.gateway.gateway import check_connected
from learner.gateway.messages import RefusedRequest
from learner.prompts.chat_template import ChatTemplate
from learner.rewards.builtin.text import last_number
from protocol.codec import pack, unpack
from protocol.messages import Completion
from tests.learner.environments.chat_tokenizer import DROPPING, END, KEEPING, call, chat_tokenizer
from tests.learner.environments.scripted_conversation import QUESTION, TOKENIZER, TURNS, calculator_tools, script_of
from tests.learner.environments.scripted_player import play_group
from tests.learner.gateway.scripted_gateway import ADD, FirstTurnPolicy, OpenEpisode, open_episode
from tests.waiting import until_in_loop

HEAD = "<|im_start|>user\nHow much?<|im_end|>\n<|im_start|>assistant\n"
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def sent_back(message: Any, *, has_reasoning: bool) -> dict[str, Any]:
    """Return a message as agents send it back."""
    chat = message.model_dump(exclude_none=True)
    if not has_reasoning:
        chat.pop("reasoning_content", None)
    return chat


async def add_up(agent: OpenEpisode, tools: list[dict[str, Any]], *, has_reasoning: bool) -> Any:
    """Play the environment `Calculator` as an agent."""
    messages, total = list(QUESTION), 0
    while True:
        message = (await agent.chat(messages, tools=tools)).choices[0].message
        messages.append(sent_back(message, has_reasoning=has_reasoning))
        if not message.tool_calls:
            return message
        for one in message.tool_calls:
            total += json.loads(one.function.arguments)["number"]
            messages.append({"role": "tool", "tool_call_id": one.id, "content": str(total)})


@pytest.mark.parametrize("has_reasoning", [True, False])
@pytest.mark.parametrize("text", [KEEPING, DROPPING])
async def test_an_agent_requests_and_records_the_same_tokens_as_an_environment_with_the_same_tools(
    text: str, has_reasoning: bool
) -> None:
    tools = calculator_tools()
    template = ChatTemplate(chat_tokenizer(text), {}, tools)
    play = partial(play_group, script_of(*TURNS), "Calculator", prompt=QUESTION, template=template)
    group, asked_by_player = await asyncio.to_thread(play)  # in a separate event loop
    expected = group.episodes[0]
    async with open_episode(script_of(*TURNS), template=template) as agent:
        last = await add_up(agent, tools, has_reasoning=has_reasoning)
        assert last.content == "It is 5"
        by_player = [one for one in asked_by_player if one.episode == 0]
        for ours, other in zip(agent.prompts, by_player, strict=True):
            assert ours.token_ids.tolist() == other.token_ids.tolist()
            assert (ours.number, ours.salt, ours.stays_at) == (other.number, other.salt, other.stays_at)
        episode = agent.end()
    assert len(episode.branches) == len(expected.branches) == (1 if text == KEEPING else 3)
    for branch, other_branch in zip(episode.branches, expected.branches, strict=True):
        assert branch.token_ids.tolist() == other_branch.token_ids.tolist()
        np.testing.assert_array_equal(branch.behavior_logprobs, other_branch.behavior_logprobs)
        assert (branch.versions, branch.finish_reason) == (other_branch.versions, other_branch.finish_reason)
        assert (branch.prompt_token_ids is None) == (other_branch.prompt_token_ids is None)
    ours_stats, stats = episode.stats, expected.stats
    assert (ours_stats.state, ours_stats.num_turns, ours_stats.num_calls) == ("finished", 3, 2)
    assert ours_stats.num_prompt_tokens == stats.num_prompt_tokens
    assert ours_stats.num_cached_tokens == stats.num_cached_tokens
    assert [one["role"] for one in episode.messages] == ["assistant", "tool", "assistant", "tool", "assistant"]


async def test_the_recorded_turn_equals_the_clients_response() -> None:
    async with open_episode(script_of("<think>two</think>Well" + call("add", number=2))) as agent:
        reply = await agent.chat(QUESTION, tools=[ADD], logprobs=True, extra_body={"return_token_ids": True})
        episode = agent.end()
    (choice,), (branch,) = reply.choices, episode.branches
    message = choice.message
    assert (choice.finish_reason, message.content, message.reasoning_content) == ("tool_calls", "Well", "two")
    (called,) = message.tool_calls
    assert (called.function.name, json.loads(called.function.arguments)) == ("add", {"number": 2})
    assert (
        choice.token_ids == branch.token_ids.tolist() and reply.prompt_token_ids == agent.prompts[0].token_ids.tolist()
    )
    np.testing.assert_allclose([one.logprob for one in choice.logprobs.content], branch.behavior_logprobs)
    num_prompt, num_sampled = len(reply.prompt_token_ids), len(branch.token_ids)
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, num_sampled)
    assert usage.total_tokens == num_prompt + num_sampled and reply.id.startswith("chatcmpl-")
    assert branch.versions == [(4, num_sampled)]


async def collect_stream(agent: OpenEpisode, messages: list[Any], **more: Any) -> dict[str, Any]:
    """Return the combined chunks of a stream."""
    combined: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    stream = await agent.chat(messages, stream=True, stream_options={"include_usage": True}, **more)
    async for chunk in stream:
        if chunk.usage is not None:
            combined["usage"] = chunk.usage.model_dump(exclude_none=True)
        for choice in chunk.choices:
            combined["content"] += choice.delta.content or ""
            combined["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            combined["tool_calls"] += [
                one.function.model_dump(exclude_none=True) for one in choice.delta.tool_calls or ()
            ]
            combined["finish_reason"] = choice.finish_reason or combined["finish_reason"]
    return combined


async def test_a_stream_equals_the_whole_answer_and_can_be_continued() -> None:
    turn = "<think>two</think>Well" + call("add", number=2) + call("add", number=3)
    async with open_episode(script_of(turn, turn, "one", "two", "three")) as agent:
        reply = await agent.chat(QUESTION, tools=[ADD])
        combined = await collect_stream(agent, QUESTION, tools=[ADD])
        (choice,) = reply.choices
        message = choice.message
        assert combined["content"] == message.content and combined["reasoning_content"] == message.reasoning_content
        assert combined["tool_calls"] == [one.function.model_dump() for one in message.tool_calls]
        assert combined["finish_reason"] == choice.finish_reason
        assert combined["usage"]["completion_tokens"] == reply.usage.completion_tokens
        first = await collect_stream(agent, QUESTION)
        chat = [
            *QUESTION,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": "And?"},
        ]
        assert (await collect_stream(agent, chat))["content"] == "two"
        stream = await agent.complete("a text", stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == "three"
        assert [chunk.finish_reason for chunk in chunks] == [None, "stop"]
        assert len(agent.end().branches) == 4


async def test_a_wrong_key_or_path_is_rejected() -> None:
    async with (
        open_episode(script_of("one")) as agent,
        AsyncOpenAI(base_url=agent.client.base_url, api_key="sk-0", max_retries=0) as stranger,
    ):
        with pytest.raises(openai.AuthenticationError, match="the API key belongs to no episode"):
            await stranger.chat.completions.create(model="any", messages=QUESTION)  # type: ignore[arg-type]
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
        with pytest.raises(openai.NotFoundError):
            await agent.client.get("/nothing", cast_to=object)
        assert agent.prompts == []
        assert [model.id for model in (await agent.client.models.list()).data] == ["tiny"]


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"temperature": 0.7}, r"temperature = 0.7 is not supported, expected 1.0: .*set learner.sampling.temperature"),
        ({"n": 2}, "n = 2 is not supported, expected 1"),
        ({"seed": 3}, "all episodes of a group would be the same"),
        ({"tool_choice": "required"}, "tool_choice = 'required' is not supported, expected 'auto' or 'none'"),
        ({"response_format": {"type": "json_object"}}, "response_format of type 'json_object' is not supported"),
        ({"max_tokens": 0}, "max_tokens = 0 must be at least 1"),
        ({"stop": [""]}, "texts of 1 to 256 characters"),
        ({"extra_body": {"stop_token_ids": [3]}}, r"stop_token_ids = \[3\] is not supported, expected \[\]"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}},
            "structured_outputs = .* is not supported, expected None"),
        ({"reasoning_effort": "low"}, "reasoning_effort = low is not supported, .* learner.data.chat_template_kwargs"),
        ({"extra_body": {"function_call": {"name": "add"}}},
            "function_call = .* is not supported, expected 'auto'; omit it; tool_choice = 'none'"),
        ({"functions": [{"name": "add", "parameters": {}}]}, "functions = .* is not supported, .* use tools"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "has parts that are not text"),
        ({"messages": [{"content": "x"}]}, "has no role"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "has a tool call without a function name"),
        ({"messages": "hello"}, "the body is not a valid request for chat completions"),
    ],
)  # fmt: skip
async def test_unsupported_options_are_rejected_with_a_reason(more: dict[str, Any], problem: str) -> None:
    async with open_episode(script_of("one")) as agent:
        with pytest.raises(openai.BadRequestError, match=problem):
            await agent.chat(more.get("messages", QUESTION), **{key: more[key] for key in more if key != "messages"})
        assert agent.prompts == []


async def test_options_equal_to_the_runs_sampling_are_accepted() -> None:
    async with open_episode(script_of("one"), sampling={"temperature": 0.5}) as agent:
        same = {"temperature": 0.5, "top_p": 1, "n": 1, "presence_penalty": 0.0, "logit_bias": {}, "user": "me"}
        await agent.chat(QUESTION, **same, extra_body={"top_k": -1, "repetition_penalty": 1.0})


async def test_sampling_options_of_an_agent_can_be_overridden() -> None:
    async with open_episode(script_of("one", "two", "three"), override_sampling=True) as agent:
        await agent.chat(QUESTION, temperature=0.7, top_p=0.9, seed=3, n=2, extra_body={"stop_token_ids": [3]})
        forced: Any = {"tools": [ADD], "tool_choice": "required", "response_format": {"type": "json_object"}}
        await agent.chat(QUESTION, **forced)
        assert len(agent.prompts) == 2 and "add" in agent.shown(1)
        await agent.chat(QUESTION, tools=[ADD], tool_choice="none")
        assert "add" not in agent.shown(2)
        with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
            await agent.chat(QUESTION, temperature=0.7, reasoning_effort="low")


@pytest.mark.parametrize(
    "arguments", ['{"number": 18446744073709551616}', '{"text": "\\ud800"}', '{"a":' * 3000 + "1" + "}" * 3000]
)
async def test_a_call_that_an_agent_sends_back_keeps_its_sampled_tokens(arguments: str) -> None:
    async with open_episode(script_of("one", "two"), max_tokens=100_000) as agent:
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        await agent.chat([*QUESTION, turn, {"role": "tool", "tool_call_id": "c1", "content": "?"}])
        episode = agent.end()
    packed = pack(EpisodeGroup(group_id="g", entered_version=0, episodes=[episode]))
    assert unpack(packed, EpisodeGroup).episodes[0].messages


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "assistant", "tool_calls": [{"id": {"a": 1}, "function": {"name": "add"}}]}, "the id of a tool call"),
        ({"role": "tool", "tool_call_id": ["c1"], "content": "5"}, "tool_call_id"),
        ({"role": "user", "name": {"a": 1}, "content": "5"}, "name"),
        ({"role": "assistant", "reasoning_content": [1], "content": "5"}, "reasoning_content"),
        ({"role": "assistant", "tool_calls": 7}, "tool_calls"),
    ],
)
async def test_a_message_whose_parts_have_another_type_is_refused(message: dict[str, Any], problem: str) -> None:
    async with open_episode(script_of("one")) as agent:
        with pytest.raises(openai.BadRequestError, match=rf"{problem} of messages\[1\] is .*; expected a"):
            await agent.chat([*QUESTION, message])


USER, ASKED = {"role": "user", "content": "What is 1 + 1?"}, {"role": "user", "content": "What is 3 + 4?"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"number": 2}'}}


@pytest.mark.parametrize(
    "shots",
    [
        [USER, {"role": "assistant", "content": "2"}],
        [USER, {"role": "assistant", "content": "2", "name": None, "tool_calls": None}],
        [USER, {"role": "assistant", "content": [{"type": "text", "text": "2"}]}],
        [{"role": "developer", "content": "Add."}, USER, {"role": "assistant", "content": "2"}],
        [USER, {"role": "assistant", "content": None, "tool_calls": [CALLED]}, {"role": "tool", "content": "2"}],
    ],
    ids=["plain", "null keys", "text parts", "developer", "calls"],
)
async def test_examples_in_the_prompt_are_no_part_of_the_completion(shots: list[dict[str, Any]]) -> None:
    prompt = [*shots, ASKED]
    async with open_episode(script_of("7"), prompt=prompt) as agent:
        await agent.chat(prompt)
        (message,) = agent.end().messages
        assert message["content"] == "7"


async def test_a_developer_message_is_rendered_as_a_system_message() -> None:
    async with open_episode(script_of("one")) as agent:
        parts = [{"type": "text", "text": text} for text in ("Be ", "short.")]
        await agent.chat([{"role": "developer", "content": parts}, *QUESTION])
        shown = TOKENIZER.decode(agent.prompts[0].token_ids.tolist())
    assert "<|im_start|>system\nBe short.<|im_end|>" in shown and "developer" not in shown


async def test_a_turn_sent_back_stripped_or_with_a_name_is_the_same_turn() -> None:
    async with open_episode(script_of(" one\n", "two", "three")) as agent:
        await agent.chat(QUESTION)
        turn = {"role": "assistant", "name": "solver", "content": "one"}
        await agent.chat([*QUESTION, turn, {"role": "user", "content": "so"}])
        assert len(agent.end().branches) == 1


async def test_max_tokens_is_applied_and_limited_by_the_run() -> None:
    async with open_episode(script_of(*"abcd"), sampling={"max_tokens": 20}, max_tokens=100) as agent:
        for wanted in ({"max_tokens": 7}, {"max_completion_tokens": 8}, {"max_tokens": 1000}, {}):
            await agent.chat(QUESTION, **wanted)
        assert [each.max_tokens for each in agent.prompts] == [7, 8, 20, 20]
    async with open_episode(script_of(*"ab"), max_tokens=len(TOKENIZER.encode(HEAD)) + 9) as agent:
        await agent.chat(QUESTION)
        assert [each.max_tokens for each in agent.prompts] == [9]


async def test_an_agents_stop_text_is_cut_from_the_text_and_kept_in_the_tokens() -> None:
    async with open_episode(script_of("one;", "two", end=""), sampling={"stop": ["e"]}) as agent:
        reply = await agent.chat(QUESTION, stop=["e", ";"])
        assert agent.prompts[0].stop == (";",) and reply.choices[0].message.content == "one"
        turn = sent_back(reply.choices[0].message, has_reasoning=True)
        await agent.chat([*QUESTION, turn, {"role": "user", "content": "so"}])
        assert agent.shown(1) == HEAD + "one;<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n"
        assert len(agent.end().branches) == 1


async def test_an_episode_gets_no_turn_beyond_the_maximum() -> None:
    async with open_episode(script_of("one", "two"), max_turns=2) as agent:
        await agent.chat(QUESTION)
        await agent.chat(QUESTION)
        with pytest.raises(openai.APIStatusError, match=r"learner\.environment\.max_turns.* in a new run") as refused:
            await agent.chat(QUESTION)
        assert refused.value.code == "max_turns" and len(agent.prompts) == 2
        assert agent.end().stats.state == "max_turns"


async def test_an_overlong_prompt_is_rejected_with_the_error_of_openai() -> None:
    long = [{"role": "user", "content": "x" * 100}]
    async with open_episode(script_of("one"), max_tokens=100) as agent:
        with pytest.raises(openai.BadRequestError, match=r"learner\.environment\.max_episode_tokens") as refused:
            await agent.chat(long)
        assert refused.value.code == "context_length_exceeded"
        assert "This model's maximum context length is 100 tokens" in str(refused.value)  # as libraries recognize it
        assert re.search(r"prompt is too long: \d+ tokens > 100 maximum", str(refused.value))
        await agent.chat(QUESTION)
        assert agent.end().stats.state == "finished"
    async with open_episode(script_of("one"), max_tokens=100) as agent:
        with pytest.raises(openai.BadRequestError):
            await agent.chat(long)
        episode = agent.end()
        assert (episode.stats.state, episode.branches) == ("length", [])


async def test_a_truncated_turn_is_reported_and_ends_its_episode_as_length() -> None:
    async with open_episode(script_of("one", "two" + call("add"), reason="length", end="")) as agent:
        reply = await agent.chat(QUESTION, tools=[ADD])
        assert reply.choices[0].finish_reason == "length"
        reply = await agent.chat(QUESTION, tools=[ADD])
        assert reply.choices[0].message.tool_calls is None
        episode = agent.end()
        assert episode.stats.state == "length"
        assert [branch.finish_reason for branch in episode.branches] == ["stop", "length"]


async def test_a_turn_truncated_in_reasoning_that_the_template_opened_is_no_answer() -> None:
    opening = ChatTemplate(chat_tokenizer(KEEPING), {"opens_reasoning": True}, [])
    async with open_episode(script_of("maybe 42, but", "5", reason="length", end=""), template=opening) as agent:
        reply = await agent.chat(QUESTION)
        assert reply.choices[0].message.content == "<think>maybe 42, but"
        await agent.chat([*QUESTION, {"role": "assistant", "content": reply.choices[0].message.content}, *QUESTION])
        episode = agent.end()
        assert len(episode.branches) == 1
        assert last_number([episode.messages[:1]], answer=["42"]) == [0.0]


async def test_concurrent_requests_are_branches_of_one_episode() -> None:
    async with open_episode(script_of("first", *(f"turn {number}" for number in range(4)))) as agent:
        reply = await agent.chat(QUESTION)
        chat = [*QUESTION, sent_back(reply.choices[0].message, has_reasoning=True)]
        questions = [[*chat, {"role": "user", "content": f"And {number}?"}] for number in range(4)]
        answers = await asyncio.gather(*(agent.chat(question) for question in questions))
        episode = agent.end()
    assert sorted(answer.choices[0].message.content for answer in answers) == [f"turn {number}" for number in range(4)]
    assert len(episode.branches) == 4 and episode.stats.num_turns == 5
    recorded = sorted(turn for branch in episode.branches for turn in branch.turns)
    assert recorded == [(0, len("first") + 1), *((turn, len("turn 0") + 1) for turn in range(1, 5))]
    assert len({turn.state for turn in episode.turns}) == 5 == len(episode.turns)
    first_ids = TOKENIZER.encode(HEAD + "first" + END)
    for branch in episode.branches:
        before = TOKENIZER.encode(HEAD) if branch.prompt_token_ids is None else branch.prompt_token_ids.tolist()
        assert [*before, *branch.token_ids.tolist()][: len(first_ids)] == first_ids
    sampled = [TOKENIZER.decode(branch.token_ids[branch.is_sampled_T].tolist()) for branch in episode.branches]
    assert sum("first" in text for text in sampled) == 1, "a turn with several continuations must be trained once"
    assert sum(branch.num_sampled for branch in episode.branches) == len("first") + 1 + 4 * (len("turn 0") + 1)


async def test_conversations_are_rendered_tokenized_and_read_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = set()

    def watched(method: Any, *args: Any, **kwargs: Any) -> Any:
        used.add((method.__name__, threading.get_ident() == loop_thread))
        return method(*args, **kwargs)

    loop_thread = threading.get_ident()
    async with open_episode(script_of("one", "two", "three")) as agent:
        for name in ("apply_chat_template", "encode", "batch_decode"):
            tokenizer = agent.template.tokenizer
            monkeypatch.setattr(tokenizer, name, partial(watched, getattr(tokenizer, name)))
        reply = await agent.chat(QUESTION)
        await agent.chat([*QUESTION, sent_back(reply.choices[0].message, has_reasoning=True), *QUESTION])
        await agent.complete("How much?")
    assert used == {(name, False) for name in ("apply_chat_template", "encode", "batch_decode")}


async def test_a_turn_whose_episode_ends_while_it_is_read_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_episode(script_of("one")) as agent:
        read = agent.gateway._read

        def end_and_read(*args: Any) -> Any:
            agent.end()
            return read(*args)

        monkeypatch.setattr(agent.gateway, "_read", end_and_read)
        with pytest.raises(openai.APIStatusError, match="the episode is over"):
            await agent.chat(QUESTION)
        assert not agent.session.episode.branches


async def test_a_conversation_changed_by_an_agent_is_another_branch() -> None:
    async with open_episode(script_of("one", "two")) as agent:
        await agent.chat(QUESTION)
        changed = [*QUESTION, {"role": "assistant", "content": "One"}, {"role": "user", "content": "so"}]
        await agent.chat(changed)
        first, second = agent.end().branches
    assert first.prompt_token_ids is None and second.prompt_token_ids is not None
    shown = HEAD + "One<|im_end|>\n<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(second.prompt_token_ids.tolist()) == shown
    assert [branch.num_sampled for branch in (first, second)] == [4, 4]


async def test_an_unreadable_call_is_text_and_the_conversation_continues() -> None:
    broken = "<tool_call>[1]</tool_call>"
    async with open_episode(script_of(broken, call("add", number=1), "two")) as agent:
        first = (await agent.chat(QUESTION, tools=[ADD])).choices[0]
        assert (first.finish_reason, first.message.content) == ("stop", broken)
        chat = [*QUESTION, sent_back(first.message, has_reasoning=True), {"role": "user", "content": "What?"}]
        second = (await agent.chat(chat, tools=[ADD], tool_choice="none")).choices[0]
        assert (second.message.content, second.message.tool_calls) == (call("add", number=1), None)
        assert len(agent.end().branches) == 2, "without tools it must be another conversation"


async def test_text_and_token_prompts_continue_recorded_turns() -> None:
    async with open_episode(script_of("one", "two", "three"), prompt="Say: ") as agent:
        first = await agent.complete("Say: ")
        assert first.choices[0].text == "one" and first.id.startswith("cmpl-")
        second = await agent.complete("Say: one and ", extra_body={"return_token_ids": True})
        assert agent.shown(1) == "Say: one<|im_end|> and "
        tokens = [*second.prompt_token_ids, *second.choices[0].token_ids, 5]
        await agent.complete([tokens])
        episode = agent.end()
        assert agent.prompts[2].token_ids.tolist() == tokens
    (branch,) = episode.branches
    assert branch.prompt_token_ids is None and branch.sampled_versions == [4, 5, 6] and episode.messages == []
    with pytest.raises(openai.BadRequestError, match="neither one text nor one list of token ids"):
        async with open_episode(script_of("one")) as agent:
            await agent.complete([0, 100000])
    async with open_episode(script_of("one")) as agent:
        for prompt, more, problem in (([], {}, "has no tokens"), ("x", {"logprobs": 1}, "do not return logprobs")):
            with pytest.raises(openai.BadRequestError, match=problem):
                await agent.complete(prompt, **more)


async def test_a_text_prompt_continues_a_turn_only_with_its_stop_text() -> None:
    for text, shown, num_branches in (
        ("Say: think; 5 ", "Say: think; 5 ", 1),
        ("Say: think 5 ", "Say: think 5 ", 2),
        ("Say: think", "Say: think", 2),
    ):
        async with open_episode(script_of("think;", "two", end=""), prompt="Say: ") as agent:
            first = await agent.complete("Say: ", stop=[";"])
            assert first.choices[0].text == "think"
            await agent.complete(text)
            assert agent.shown(1) == shown and len(agent.end().branches) == num_branches


async def test_abandoned_requests_are_cancelled_and_nothing_is_recorded_after_the_end() -> None:
    async with open_episode(policy := FirstTurnPolicy()) as agent:
        chat = [*QUESTION, (await agent.chat(QUESTION)).choices[0].message, *QUESTION]
        impatient = asyncio.create_task(agent.chat(chat))
        await until_in_loop(lambda: policy.num_held == 1)
        impatient.cancel()
        await until_in_loop(lambda: policy.num_given_up == 1)
        late = asyncio.create_task(agent.chat(chat))
        await until_in_loop(lambda: policy.num_held == 2)
        agent.end()
        assert agent.session.leave() == "finished"
        with pytest.raises(openai.APIStatusError, match=r"the episode is over \(finished\)") as over:
            await late
        assert (over.value.status_code, policy.num_given_up) == (410, 2)
        with agent.gateway.opened(agent.session) as agent.client.api_key:
            pass
        for ask in (agent.chat(QUESTION), agent.client.models.list()):
            with pytest.raises(openai.APIStatusError, match=r"the episode is over \(finished\)"):
                await ask
        episode = agent.session.episode
        assert (episode.stats.num_turns, len(episode.branches), len(agent.prompts)) == (1, 1, 3)


def test_a_turn_that_its_agent_never_received_is_not_recorded() -> None:
    with pytest.raises(RefusedRequest, match="the client has disconnected"):
        check_connected(SimpleNamespace(transport=None))  # type: ignore[arg-type]


async def test_an_episode_without_a_server_is_aborted() -> None:
    def script(each: Any) -> Completion | None:
        return None

    async with open_episode(script) as agent:
        with pytest.raises(openai.InternalServerError, match="no server could answer"):
            await agent.chat(QUESTION)
        episode = agent.end()
        assert (episode.stats.state, episode.reward) == ("aborted", None)
