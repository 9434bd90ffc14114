"""Conversations of a scripted policy with the tools of the environment `Calculator`, by a tiny chat template."""

from collections.abc import Callable
from functools import cache
from typing import Any

from learner.config import EnvironmentConfig
from learner.environments.episode import Episode, EpisodeGroup
from learner.environments.player import TurnPrompt
from learner.environments.process import tools_of
from learner.prompts.chat_template import ChatTemplate
from protocol.messages import Completion
from tests.learner.environments.chat_tokenizer import END, KEEPING, call, chat_tokenizer
from tests.learner.environments.play import USER, completion, played

TOKENIZER = chat_tokenizer()
QUESTION = [{"role": "user", "content": "How much?"}]
TURNS = ("<think>two</think>first" + call("add", number=2), "<think>three</think>" + call("add", number=3), "It is 5")


@cache
def calculator_tools() -> list[dict[str, Any]]:
    return tools_of(EnvironmentConfig(factory=f"{USER}:Calculator"))


def template(text: str = KEEPING, **arguments: Any) -> ChatTemplate:
    return ChatTemplate(chat_tokenizer(text), arguments, calculator_tools())


def says(*turns: str, reason: str = "stop", end: str = END) -> Callable[[TurnPrompt], Completion]:
    """The policy's turns, each with the token that ends it."""
    return lambda asked: completion(
        TOKENIZER.encode(turns[asked.number] + end, add_special_tokens=False), 4 + asked.number, reason
    )


def conversed(
    with_template: ChatTemplate, *turns: str, factory: str | None = "Calculator", **more: Any
) -> tuple[Episode, list[TurnPrompt]]:
    """The first episode of a group that is played, and its turns as they were asked."""
    prompt = more.pop("prompt", QUESTION)
    group, asked = played(says(*turns), factory, prompt=prompt, template=with_template, **more)  # type: ignore[arg-type]
    assert isinstance(group, EpisodeGroup)
    return group.episodes[0], [one for one in asked if one.episode == 0]


def shown(with_template: ChatTemplate, asked: TurnPrompt) -> str:
    return with_template.tokenizer.decode(asked.token_ids.tolist())
