"""Answers in the formats of several families, read by the package `renderers`; what they mean is written down by hand."""

from typing import Any

import pytest

from learner.environments.answer import UnreadableAnswer, read_answer, renderer_of
from learner.prompts.chat_template import ChatTemplate, TurnFormat
from protocol.errors import ConfigError
from tests.learner.environments.chat_tokenizer import END, chat_tokenizer
from tests.learner.environments.test_conversations import conversed, shown, template

TOKENS = {
    "glm-4.5": (
        "[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|endoftext|> <think> </think> <tool_call> </tool_call> "
        "<arg_key> </arg_key> <arg_value> </arg_value>"
    ),
    "llama-3": (
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|end_of_text|> <|eom_id|> <|python_tag|>"
    ),
    "qwen3.5": (
        "<|endoftext|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <|vision_start|> <|vision_end|> "
        "<|image_pad|> <|video_pad|>"
    ),
    "qwen3": "<|endoftext|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response>",
}
SAID = {
    "glm-4.5": "<think>two</think>\nfirst\n<tool_call>add\n<arg_key>number</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>",
    "llama-3": '{"name": "add", "parameters": {"number": 2}}<|eot_id|>',
    "qwen3.5": (
        "<think>\ntwo\n</think>\n\nfirst\n\n<tool_call>\n<function=add>\n<parameter=number>\n2\n</parameter>\n</function>\n</tool_call>"
        + END
    ),
    "qwen3": '<think>\ntwo\n</think>\n\nfirst\n<tool_call>\n{"name": "add", "arguments": {"number": 2}}\n</tool_call>'
    + END,
}


def of_family(name: str) -> ChatTemplate:
    """A conversation's template with the tokens that the family's format is made of."""
    tools = template().tools
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens([token for token in TOKENS[name].split() if token != END], special_tokens=True)
    return ChatTemplate(tokenizer, {}, tools, TurnFormat(name))


def read(with_template: ChatTemplate, said: str) -> dict[str, Any]:
    encode = with_template.tokenizer.encode
    return read_answer(with_template, encode("How much?"), encode(said, add_special_tokens=False))


@pytest.mark.parametrize("family", SAID)
def test_a_call_is_read_in_the_format_of_the_family(family: str) -> None:
    message = read(of_family(family), SAID[family])
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"number": 2}}
    if family != "llama-3":  # which says nothing beside a call, and does not reason
        assert message["reasoning_content"].strip() == "two" and message["content"].strip() == "first"


def test_reasoning_that_the_prompt_has_opened_is_no_content() -> None:
    spoken = of_family("qwen3.5")
    encode = spoken.tokenizer.encode
    opened = encode(f"How much?{END}\n<|im_start|>assistant\n<think>\n")
    said = SAID["qwen3.5"].removeprefix("<think>\n")
    message = read_answer(spoken, opened, encode(said, add_special_tokens=False))
    assert (message["reasoning_content"].strip(), message["content"].strip()) == ("two", "first")


def test_a_call_of_what_is_not_there_is_a_call_whose_caller_gets_an_error() -> None:
    message = read(of_family("glm-4.5"), SAID["glm-4.5"].replace("add", "subtract"))
    assert message["tool_calls"][0]["function"] == {"name": "subtract", "arguments": {"number": 2}}


def test_a_call_that_cannot_be_made_out_is_unreadable() -> None:
    with pytest.raises(UnreadableAnswer, match=r"is not a valid call \(invalid_json\)"):
        read(of_family("qwen3"), '<tool_call>\n{"name": "add", "arguments"\n</tool_call>' + END)


def test_an_episode_is_played_in_the_format_that_the_config_names() -> None:
    spoken = of_family("qwen3.5")
    episode, asked = conversed(spoken, SAID["qwen3.5"].removesuffix(END), "It is 2")
    assert (episode.course.state, episode.course.num_turns, episode.course.num_calls) == ("finished", 2, 1)
    assert (episode.course.num_failed_calls, episode.messages[1]["role"]) == (0, "tool")
    assert "tool\n" + str(episode.messages[1]["content"]) in shown(spoken, asked[1])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("qwen-9", "Known: .*glm-4.5"),
        ("auto", "is not a format; set it to one"),
        ("glm-4.5", r"does not fit the tokenizer.*\[gMASK\].*set it to the format"),
    ],
)
def test_a_format_that_is_unknown_or_of_another_model_is_refused_at_the_start(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"learner.environment.tool_call_format = '{name}'.*{told}"):
        renderer_of(chat_tokenizer(), name)
