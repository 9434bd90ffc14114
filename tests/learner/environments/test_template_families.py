"""Prompts of every family compared with its chat template, token by token. One test prints the grid."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from learner.config import DataConfig
from learner.environments.answer import check_calls, read_answer
from learner.environments.conversation import ChatConversation, NextPrompt, continued
from learner.environments.host import StepResult
from learner.prompts.chat_template import ChatTemplate, Message, TurnFormat
from learner.prompts.encoding import Encoder
from protocol.errors import ConfigError, DataError
from tests.learner.environments.template_families import ADD, FAMILIES, QUESTION, TOOLS, Family, chat_of, encoded

MORE: list[Message] = [{"role": "user", "content": "And now?"}]
BEHIND, ANEW, REFUSED, NO_READER, NONE = "=", "anew", "refused", "no reader", ""
"""Kind of a prompt.

`=`: the recorded tokens, plus the template's continuation, equal its rendering of the conversation.
`anew`: the template renders earlier messages differently, so a new branch starts with its rendering.
`refused`: by the template, or by the learner because the template would omit the message.
`no reader`: no format reads the turn; a run with tools does not start.
Empty: the family has no such feature.
"""


def rendered(template: ChatTemplate, messages: Sequence[Message], **options: Any) -> list[int]:
    """Return the rendering by transformers alone."""
    more = {"tools": template.tools} if template.tools else {}
    text = template.tokenizer.apply_chat_template(
        list(messages), tokenize=False, **({"add_generation_prompt": True} | options), **template.arguments, **more
    )
    return list(template.tokenizer.encode(text, add_special_tokens=False))


def way_of(template: ChatTemplate, next_prompt: NextPrompt, recorded: list[int], messages: Sequence[Message]) -> str:
    """Return the kind of the next prompt, and check that it is the template's rendering."""
    before = next_prompt.token_ids if next_prompt.begins_branch else [*recorded, *next_prompt.token_ids]
    assert template.tokenizer.decode(before) == template.tokenizer.decode(rendered(template, messages))
    assert before == rendered(template, messages)
    return ANEW if next_prompt.begins_branch else BEHIND


def kind_of_prompt(template: ChatTemplate, messages: list[Message], **options: Any) -> str:
    """Return the kind of a prompt of the data."""
    try:
        (token_ids,) = Encoder("data", DataConfig(path="data"), template).encode([{"prompt": messages}], [0])[
            "token_ids"
        ]
    except DataError:
        return REFUSED
    assert token_ids == rendered(template, messages, **options)
    assert all(str(message["content"]) in template.tokenizer.decode(token_ids) for message in messages)
    return BEHIND


# --- cases --------------------------------------------------------------------------------------------------------


def one_turn(family: Family, template: ChatTemplate) -> str:
    reply = encoded(template, family.write_turn("It is 7"))
    message = read_answer(template, template.prompt_ids(QUESTION), reply)
    assert not message.get("tool_calls")
    return kind_of_prompt(template, QUESTION) if str(message["content"]).strip() == "It is 7" else NO_READER


def several_turns(family: Family, template: ChatTemplate) -> str:
    return _next_question(family, template, None)


def reasoning_then_a_question(family: Family, template: ChatTemplate) -> str:
    return NONE if family.think is None else _next_question(family, template, "Two and five")


def _next_question(family: Family, template: ChatTemplate, reasoning: str | None) -> str:
    before = template.prompt_ids(QUESTION)
    turn = encoded(template, family.write_turn("It is 7", reasoning=reasoning))
    message = read_answer(template, before, turn)
    if str(message["content"]).strip() != "It is 7":
        return NO_READER
    assert (message.get("reasoning_content") or "").strip() == (reasoning or "")
    next_prompt = continued(template, [*QUESTION, message], MORE, [*before, *turn])
    return way_of(template, next_prompt, [*before, *turn], [*QUESTION, message, *MORE])


def one_call(family: Family, template: ChatTemplate) -> str:
    return _called(family, template, 1)


def two_calls(family: Family, template: ChatTemplate) -> str:
    return _called(family, template, 2)


def a_call_after_reasoning(family: Family, template: ChatTemplate) -> str:
    return NONE if family.think is None else _called(family, template, 1, "Two and five")


def _called(family: Family, template: ChatTemplate, num_calls: int, reasoning: str | None = None) -> str:
    """Return the kind of the prompt after a turn with calls and its answers, twice."""
    if family.call is None or num_calls > family.max_calls:
        return NONE
    try:
        check_calls(template)
    except ConfigError:
        return NO_READER
    talk, recorded, ways = ChatConversation(template, QUESTION), template.prompt_ids(QUESTION), []
    for _ in range(2):
        turn = encoded(template, family.write_turn(calls=[ADD] * num_calls, reasoning=reasoning))
        calls = talk.commands_of(recorded, turn)
        assert [(call.name, call.arguments) for call in calls] == [ADD] * num_calls
        try:
            next_prompt = talk.add_results([StepResult("2")] * num_calls)
        except DataError:
            return REFUSED
        ways.append(way_of(template, next_prompt, [*recorded, *turn], [*QUESTION, *talk.messages]))
        recorded = next_prompt.token_ids if next_prompt.begins_branch else [*recorded, *turn, *next_prompt.token_ids]
    (way,) = set(ways)
    return way


def system(family: Family, template: ChatTemplate) -> str:
    return kind_of_prompt(template, [{"role": "system", "content": "Be short."}, *QUESTION])


def developer(family: Family, template: ChatTemplate) -> str:
    return kind_of_prompt(template, [{"role": "developer", "content": "Be short."}, *QUESTION])


def begun_answer(family: Family, template: ChatTemplate) -> str:
    started = [*QUESTION, {"role": "assistant", "content": "Let me see:"}]
    return kind_of_prompt(template, started, add_generation_prompt=False, continue_final_message=True)


CASES: list[Callable[[Family, ChatTemplate], str]] = [
    one_turn, several_turns, reasoning_then_a_question, one_call, two_calls, a_call_after_reasoning, system, developer,
    begun_answer,
]  # fmt: skip
EXPECTED = {
    # one turn, several, with reasoning; one call, two, after reasoning; system, developer, a started answer
    "qwen2.5": ["=", "=", "", "=", "=", "", "=", "refused", "="],
    "qwen3": ["=", "=", "anew", "=", "=", "=", "=", "refused", "="],
    "qwen3.5": ["=", "anew", "anew", "=", "=", "=", "=", "refused", "="],
    "llama3": ["=", "=", "", "=", "", "", "=", "=", "="],
    "mistral": ["=", "=", "", "no reader", "no reader", "", "=", "refused", "="],
    "gemma3": ["=", "=", "", "", "", "", "=", "refused", "="],
    "gemma4": ["=", "=", "anew", "=", "=", "=", "=", "=", "="],
    "phi3.5": ["=", "=", "", "", "", "", "=", "refused", "="],
    "phi4": ["=", "=", "", "", "", "", "=", "refused", "="],
    "phi4-mini": ["=", "=", "", "no reader", "no reader", "", "=", "=", "="],
    "glm4.5": ["=", "=", "anew", "=", "=", "=", "=", "refused", "="],
    "glm5": ["=", "anew", "anew", "anew", "anew", "=", "=", "refused", "="],
    "gpt-oss": ["no reader", "no reader", "", "", "", "", "=", "=", "="],
    "smollm2": ["=", "=", "", "", "", "", "=", "=", "="],
    "smollm3": ["=", "=", "=", "=", "=", "=", "=", "refused", "="],
    "deepseek-r1-distill": ["=", "anew", "anew", "", "", "", "=", "refused", "="],
    "granite": ["=", "=", "", "no reader", "no reader", "", "=", "=", "="],
    "olmo2": ["=", "=", "", "", "", "", "=", "refused", "="],
}


def test_the_prompts_of_every_family_match_its_template() -> None:
    found = {}
    for name, family in FAMILIES.items():
        with_tools, without = chat_of(name, TOOLS if family.call else []), chat_of(name, [])
        found[name] = [case(family, with_tools if "call" in case.__name__ else without) for case in CASES]
    print("\n" + " | ".join(["family", *(case.__name__ for case in CASES)]))
    print("\n".join(" | ".join([name, *ways]) for name, ways in found.items()))
    assert found == EXPECTED


def test_a_message_that_the_template_omits_is_rejected_except_for_agents() -> None:
    template, row = chat_of("qwen3", []), {"prompt": [{"role": "developer", "content": "Be short."}, *QUESTION]}
    with pytest.raises(
        DataError,
        match=r"row 3 of data: .* omits messages of role 'developer' \('Be short.'\); use .* 'system'",
    ):
        Encoder("data", DataConfig(path="data"), template).encode([row], [3])
    for_agent = msgspec.structs.replace(template, turns=msgspec.structs.replace(template.turns, goes_on=False))
    Encoder("data", DataConfig(path="data"), for_agent).encode([row], [3])


@pytest.mark.parametrize(
    ("written", "begins_branch"),
    [('{"name":"add",  "arguments":{"number":2}}', False), ('{"name": "add", "arguments": {"number": 2e0}}', True)],
)
def test_sampled_tokens_are_kept_unless_the_template_changes_more_than_whitespace(
    written: str, begins_branch: bool
) -> None:
    template = chat_of("qwen3", TOOLS)
    talk, before = ChatConversation(template, QUESTION), template.prompt_ids(QUESTION)
    turn = encoded(template, f"<tool_call>{written}</tool_call><|im_end|>")
    talk.commands_of(before, turn)
    next_prompt = talk.add_results([StepResult("2")])
    shown = rendered(template, [*QUESTION, *talk.messages])
    assert next_prompt.begins_branch == begins_branch
    if begins_branch:
        assert next_prompt.token_ids == shown
    else:
        assert [*before, *turn] != shown[: len(before) + len(turn)] and shown[
            -len(next_prompt.token_ids) :
        ] == next_prompt.token_ids
        assert template.tokenizer.decode(next_prompt.token_ids).startswith("\n<|im_start|>user\n")


SHOWS_NO_REASONING_OTHERWISE = {"qwen3.5", "glm5", "gpt-oss", "deepseek-r1-distill"}
"""Families whose template renders turns without reasoning differently from how a policy writes them."""


@pytest.mark.parametrize(
    ("name", "end"), [(name, end) for name, family in FAMILIES.items() for end in family.ends.split()]
)
def test_a_turn_can_end_with_any_end_token_of_the_generation_config(name: str, end: str) -> None:
    family, template = FAMILIES[name], chat_of(name, [])
    own = family.ends.split()[0]
    before = template.prompt_ids(QUESTION)
    turn = encoded(template, family.write_turn("It is 7").removesuffix(own) + end)
    message = read_answer(template, before, turn)
    assert str(message["content"]).endswith("It is 7") and template.spoken(turn).endswith("It is 7")
    next_prompt = continued(template, [*QUESTION, message], MORE, [*before, *turn])
    assert next_prompt.begins_branch == (end != own or name in SHOWS_NO_REASONING_OTHERWISE)
    way_of(template, next_prompt, [*before, *turn], [*QUESTION, message, *MORE])


@pytest.mark.parametrize("name", FAMILIES)
def test_the_warm_start_trains_the_end_token_of_the_template(name: str) -> None:
    template = chat_of(name, [])
    assert template.tokenizer.convert_ids_to_tokens([template.turn_end()]) == [FAMILIES[name].ends.split()[0]]
    nameless = msgspec.structs.replace(template, turns=TurnFormat())
    assert nameless.turn_end() == template.tokenizer.eos_token_id
