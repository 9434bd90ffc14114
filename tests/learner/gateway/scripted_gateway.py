"""A gateway on a real socket with a scripted policy, for the plain openai client or an agent's process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import msgspec
from openai import AsyncOpenAI

from learner.config import LearnerConfig
from learner.environments.episode import Episode, EpisodeGroup
from learner.environments.player import TurnPrompt
from learner.gateway.gateway import Gateway
from learner.gateway.players import AgentPlayer
from learner.gateway.session import Session
from learner.prompts.chat_template import ChatTemplate
from learner.prompts.prompts import Prompt
from learner.servers.loop_thread import LoopThread
from protocol.messages import Completion
from tests.learner.environments.chat_tokenizer import KEEPING, chat_tokenizer
from tests.learner.environments.scripted_conversation import QUESTION, script_of
from tests.learner.environments.scripted_player import Script, ScriptedPolicy

PLAY_DEADLINE_S = 240.0
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}},
}


class OpenEpisode(msgspec.Struct, eq=False):
    """A running episode and its client."""

    gateway: Gateway
    session: Session
    client: AsyncOpenAI
    prompts: list[TurnPrompt]
    template: ChatTemplate

    async def chat(self, messages: list[Any], **more: Any) -> Any:
        return await self.client.chat.completions.create(model="any", messages=messages, **more)

    async def complete(self, prompt: Any, **more: Any) -> Any:
        return await self.client.completions.create(model="any", prompt=prompt, **more)

    def shown(self, number: int) -> str:
        """Return the prompt of a turn as text."""
        return self.template.tokenizer.decode(self.prompts[number].token_ids.tolist())

    def end(self) -> Episode:
        self.session.end(1.0)
        return self.session.episode


def config_of(
    sampling: dict[str, Any] | None = None, advantage: dict[str, Any] | None = None, **environment: Any
) -> LearnerConfig:
    settings = {} if {"agent", "command"} & environment.keys() else {"agent": "none:none"}
    return msgspec.convert(
        {
            "steps": 1, "data": {"task": "guess", "num_prompts": 1}, "reward": {"functions": ["environment_reward"]},
            "sampling": {"group_size": 2, "max_tokens": 200} | (sampling or {}), "environment": settings | environment,
            "advantage": advantage or {},
        },
        LearnerConfig,
    )  # fmt: skip


@asynccontextmanager
async def open_episode(
    script: Script, *, prompt: Any = QUESTION, template: ChatTemplate | None = None, max_tokens: int = 2000,
    sampling: dict[str, Any] | None = None, **environment: Any,
) -> AsyncIterator[OpenEpisode]:  # fmt: skip
    """Open an episode whose key the client has."""
    config, template = config_of(sampling, **environment), template or ChatTemplate(chat_tokenizer(KEEPING), {}, [])
    gateway = Gateway(config, template, "tiny")
    await gateway.start()
    ask = ScriptedPolicy(script)
    token_ids = template.tokenizer.encode(prompt) if isinstance(prompt, str) else template.token_ids(prompt)
    session = Session(config, Prompt(prompt_id=0, prompt=prompt, token_ids=token_ids, columns={}), 0, ask, max_tokens)
    try:
        with gateway.opened(session) as key:
            async with AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0, timeout=60) as client:
                yield OpenEpisode(gateway, session, client, ask.prompts, template)
    finally:
        await gateway.close()


says_five = script_of(*["Five"] * 9)


class FirstTurnPolicy:
    """A policy that answers only the first turn of each episode."""

    num_held = num_given_up = 0

    async def __call__(self, turn: TurnPrompt) -> Completion:
        if turn.number:
            self.num_held += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.num_given_up += 1
        return says_five(turn)


def play_with_agent(
    columns: dict[str, Any] | None, prompt: Any = QUESTION, script: Script = says_five, times: int = 1,
    then: Callable[[], None] = lambda: None, **environment: Any,
) -> EpisodeGroup:  # fmt: skip
    """Play groups of two episodes with an agent's process. Return the last group. `then` runs before the end."""
    config, template = config_of(**environment), ChatTemplate(chat_tokenizer(KEEPING), {}, [])
    loop, ask = LoopThread("test"), ScriptedPolicy(script)
    row = Prompt(prompt_id=0, prompt=prompt, token_ids=template.token_ids(prompt), columns=columns or {})
    with ExitStack() as cleanup:
        cleanup.callback(loop.stop)
        player = AgentPlayer(config, template, "tiny")
        player.start(loop, cleanup)
        for _ in range(times):
            group = loop.call(player.play("3.0", row, ask, num_episodes=2, max_tokens=8000), PLAY_DEADLINE_S)
        then()
    return group
