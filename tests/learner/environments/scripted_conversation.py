"""Conversations of a scripted policy with the tools of the environment `Calculator`, in a tiny chat template."""

from collections.abc import Callable
from typing import Any

from learner.environments.contract import load_environment, load_functions
from learner.environments.episode import Episode, EpisodeGroup
from learner.environments.host import Describe, Host, ToolSchemas
from learner.environments.player import TurnPrompt
from learner.prompts.chat_template import ChatTemplate
from protocol.messages import Completion
from tests.learner.environments.chat_tokenizer import END, KEEPING, call, chat_tokenizer
from tests.learner.environments.scripted_player import USER, completion, play_group

TOKENIZER = chat_tokenizer()
QUESTION = [{"role": "user", "content": "How much?"}]
TURNS = ("<think>two</think>first" + call("add", number=2), "<think>three</think>" + call("add", number=3), "It is 5")


def described(factory: str | None, *functions: str) -> list[dict[str, Any]]:
    """Return the schemas of tools. Built in this process, which has imported transformers."""
    host = Host(None if factory is None else load_environment(factory, takes_text=False), load_functions(functions))
    answer = host.answer(Describe())
    assert isinstance(answer, ToolSchemas), answer
    return answer.schemas


def calculator_tools() -> list[dict[str, Any]]:
    return described(f"{USER}:Calculator")


def template(text: str = KEEPING, **arguments: Any) -> ChatTemplate:
    return ChatTemplate(chat_tokenizer(text), arguments, calculator_tools())


def script_of(*turns: str, reason: str = "stop", end: str = END) -> Callable[[TurnPrompt], Completion]:
    """Return a script of the policy's turns, each with its end token."""
    return lambda turn: completion(
        TOKENIZER.encode(turns[turn.number] + end, add_special_tokens=False), 4 + turn.number, reason
    )


def converse(
    with_template: ChatTemplate, *turns: str, factory: str | None = "Calculator", **more: Any
) -> tuple[Episode, list[TurnPrompt]]:
    """Play a group. Return its first episode and the prompts of the turns."""
    prompt = more.pop("prompt", QUESTION)
    group, prompts = play_group(script_of(*turns), factory, prompt=prompt, template=with_template, **more)  # type: ignore[arg-type]
    assert isinstance(group, EpisodeGroup)
    return group.episodes[0], [one for one in prompts if one.episode == 0]


def shown(with_template: ChatTemplate, turn: TurnPrompt) -> str:
    return with_template.tokenizer.decode(turn.token_ids.tolist())
