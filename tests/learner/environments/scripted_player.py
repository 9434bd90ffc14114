"""The player with a scripted policy and a real environment: plays a group and records the prompts of its turns."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np

from learner.config import LearnerConfig
from learner.environments.episode import EpisodeGroup
from learner.environments.player import Player, TurnPrompt, TurnResult
from learner.environments.process import Environments
from learner.prompts.chat_template import ChatTemplate
from learner.prompts.prompts import Prompt
from protocol.messages import Completion, Group

USER = "tests.learner.environments.user_environments"


class LetterTokenizer:
    """A tokenizer with one token per character, for texts only."""

    eos_token_id, all_special_ids = -1, ()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def batch_decode(self, texts: list[list[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(map(chr, token_ids)) for token_ids in texts]


def completion(text: str | list[int], version: int, reason: str = "stop") -> Completion:
    """Return a completion of tokens, or of a text with one token per letter."""
    ids = np.array([ord(letter) for letter in text] if isinstance(text, str) else text, np.int32)
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return Completion(token_ids=ids, behavior_logprobs=logprobs, versions=[(version, len(ids))], finish_reason=reason)


Script = Callable[[TurnPrompt], Completion | Awaitable[Completion | None] | None]


class ScriptedPolicy:
    """Answers from a script, as a server would, and records its prompts."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.prompts: list[TurnPrompt] = []

    async def __call__(self, turn: TurnPrompt) -> TurnResult | None:
        self.prompts.append(turn)
        answer = self._script(turn)
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer is None:
            return None
        group = Group(
            group_id="g", entered_version=5 - turn.number, completions=[answer], salt=f"salt {turn.episode}",
            num_cached_tokens=turn.number,
        )  # fmt: skip
        return TurnResult(group, f"server {turn.number}")


def play_group(
    script: Script, factory: str | None = "Echo", columns: dict[str, Any] | None = None,
    prompt: Any = "p", max_tokens: int = 1000, template: ChatTemplate | None = None, asks_attributes: bool = False,
    **environment: Any,
) -> tuple[EpisodeGroup, list[TurnPrompt]]:  # fmt: skip
    """Play a group of two, with conversations if there is a template. Return it with the turn prompts in order."""
    settings = {
        "factory": factory and (factory if ":" in factory else f"{USER}:{factory}"),
        "timeout_s": 20.0,
    } | environment
    reward = "exact_match" if settings["factory"] is None else "environment_reward"
    config = msgspec.convert(
        {
            "steps": 1, "data": {"task": "guess", "num_prompts": 1}, "reward": {"functions": [reward]},
            "sampling": {"group_size": 2, "max_tokens": 8 if template is None else 200}, "environment": settings,
        },
        LearnerConfig,
    )  # fmt: skip
    environments = Environments(config.environment, takes_text=template is None)
    player = Player(config, template or ChatTemplate(LetterTokenizer(), {}, []), environments, asks_attributes)  # type: ignore[arg-type]
    ask = ScriptedPolicy(script)
    try:
        token_ids = template.prompt_ids(prompt) if template else [1, 2]
        row = Prompt(prompt_id=0, prompt=prompt, token_ids=token_ids, columns=columns or {})
        group = asyncio.run(player.play("3.0", row, ask, num_episodes=2, max_tokens=max_tokens))
    finally:
        environments.close()
    return group, sorted(ask.prompts, key=lambda turn: (turn.episode, turn.number))


def script_of(*texts: str | list[int]) -> Callable[[TurnPrompt], Completion]:
    return lambda asked: completion(texts[asked.number], version=4 + asked.number)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]
