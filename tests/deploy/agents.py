"""The agents of deploy/agents, and a policy that plays them by a script."""

from collections.abc import Callable
from typing import Any

from protocol.messages import Completion
from tests.deploy.commands import DEPLOY
from tests.learner.environments.chat_tokenizer import END, chat_tokenizer
from tests.learner.environments.play import completion

AGENTS = DEPLOY / "agents"


def says(*turns: str) -> Callable[[Any], Completion]:
    return lambda asked: completion(chat_tokenizer().encode(turns[asked.number] + END, add_special_tokens=False), 4)
