"""A gateway on a real socket with a scripted policy behind it, and the plain openai client before it, for tests."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from openai import AsyncOpenAI

from learner.config import LearnerConfig
from learner.environments.episode import Episode
from learner.environments.player import Asked, Sampled
from learner.gateway.gateway import Gateway
from learner.gateway.session import Session
from learner.prompts.chat_template import ChatTemplate
from learner.prompts.prompts import Prompt
from protocol.messages import Completion, Group
from tests.learner.environments.chat_tokenizer import KEEPING, chat_tokenizer

QUESTION = [{"role": "user", "content": "How much?"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}},
}
Script = Callable[[Asked], Completion | None]


class Scripted:
    """Answers what a script says, as a server would; notes what it was asked."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.asked: list[Asked] = []

    async def __call__(self, turn: Asked) -> Sampled | None:
        self.asked.append(turn)
        answer = self._script(turn)
        if answer is None:
            return None
        group = Group(
            group_id="g", entered_version=5 - turn.number, completions=[answer], salt=f"salt {turn.episode}",
            num_cached_tokens=turn.number,
        )  # fmt: skip
        return Sampled(group, f"server {turn.number}")


class Opened(msgspec.Struct, eq=False):
    """An episode that goes on."""

    session: Session
    client: AsyncOpenAI
    asked: list[Asked]
    template: ChatTemplate

    async def chat(self, messages: list[Any], **more: Any) -> Any:
        return await self.client.chat.completions.create(model="any", messages=messages, **more)

    async def complete(self, prompt: Any, **more: Any) -> Any:
        return await self.client.completions.create(model="any", prompt=prompt, **more)

    def shown(self, number: int) -> str:
        """The prompt of a turn, as text."""
        return self.template.tokenizer.decode(self.asked[number].token_ids.tolist())

    def end(self) -> Episode:
        self.session.end(1.0)
        return self.session.episode


def config_of(sampling: dict[str, Any] | None = None, **environment: Any) -> LearnerConfig:
    settings = {} if {"agent", "command"} & environment.keys() else {"agent": "none:none"}
    return msgspec.convert(
        {
            "steps": 1, "data": {"task": "guess", "num_prompts": 1}, "reward": {"functions": ["environment_reward"]},
            "sampling": {"num_completions": 2, "max_tokens": 200} | (sampling or {}), "environment": settings | environment,
        },
        LearnerConfig,
    )  # fmt: skip


@asynccontextmanager
async def opened(
    script: Script, *, prompt: Any = QUESTION, template: ChatTemplate | None = None, max_tokens: int = 2000,
    sampling: dict[str, Any] | None = None, **environment: Any,
) -> AsyncIterator[Opened]:  # fmt: skip
    """An episode whose key the client has."""
    config, template = config_of(sampling, **environment), template or ChatTemplate(chat_tokenizer(KEEPING), {}, [])
    gateway = Gateway(config, template, "tiny")
    await gateway.start()
    ask = Scripted(script)
    token_ids = template.tokenizer.encode(prompt) if isinstance(prompt, str) else template.token_ids(prompt)
    session = Session(config, Prompt(prompt_id=0, prompt=prompt, token_ids=token_ids, columns={}), 0, ask, max_tokens)
    try:
        with gateway.opened(session) as key:
            async with AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0, timeout=60) as client:
                yield Opened(session, client, ask.asked, template)
    finally:
        await gateway.close()
