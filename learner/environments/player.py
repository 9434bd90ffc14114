"""Plays episodes: the policy's turns, asked of the servers, and what the environment says to each.

    prompt ─▶ reset ─▶ (turn: asked with every token so far ─▶ its text to the environment ─▶ what it says, as tokens)* ─▶ reward

Between the rollouts, which ask the servers, and the pool of environments. Invariant: every episode ends, in one of the states of
episode.py: each turn has the server's deadline, each call of the environment its own, and their number is bounded.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from learner.config import LearnerConfig
from learner.environments.episode import REWARDED, Course, EndState, Episode, PlayedGroup, Recording
from learner.environments.host import Order, Rate, Rated, Reset, Said, Turn
from learner.environments.pool import Environments, Seat
from learner.environments.process import Trouble
from learner.prompts.prompts import Prompt
from protocol.errors import DataError
from protocol.messages import Group

log = logging.getLogger(__name__)


class Asked(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A turn as the player wants it."""

    episode: int
    """In its group."""
    number: int
    """In its episode, from 0."""
    token_ids: np.ndarray
    max_tokens: int
    salt: str
    """Of the episode's first turn; empty in it."""
    stays_at: str
    """The endpoint of the server that gave the turn before, which has its keys and values."""


class Sampled(msgspec.Struct, frozen=True, eq=False):
    """A turn that has come: a group of one completion."""

    group: Group
    endpoint: str


Ask = Callable[[Asked], Awaitable[Sampled | None]]
"""None: no server could answer."""


class Player:
    """Of one run; `max_tokens` of an episode are counted with its prompt."""

    def __init__(self, config: LearnerConfig, tokenizer: PreTrainedTokenizerBase, environments: Environments) -> None:
        self._config, self._tokenizer, self._environments = config, tokenizer, environments

    async def play(self, group_id: str, prompt: Prompt, ask: Ask, max_tokens: int) -> PlayedGroup:
        """Play the group of a prompt; episodes in which the policy said nothing are left out. Raises DataError."""
        if not isinstance(prompt.prompt, str):
            raise DataError(
                f"the prompt in row {prompt.prompt_id} is a conversation; with learner.environment.factory prompts are plain texts so "
                "far, which what is said follows as it is. Give texts, without learner.data.system_prompt"
            )
        num_episodes = self._config.sampling.num_completions
        played = await asyncio.gather(
            *(self._episode(Progress(prompt, episode, max_tokens), ask) for episode in range(num_episodes))
        )
        for episode in (one.episode for one in played):
            if episode.course.state not in REWARDED:
                log.warning("an episode of group %s ended as %s", group_id, episode.course.state)
        entered = [one.entered_version for one in played if one.entered_version is not None]
        return PlayedGroup(
            group_id=group_id,
            entered_version=min(entered, default=0),
            episodes=[one.episode for one in played if one.episode.branches],
        )

    async def _episode(self, progress: "Progress", ask: Ask) -> "Progress":
        async with self._environments.seat() as seat:
            said = await progress.call(seat, Reset({"prompt": progress.prompt.prompt, **progress.prompt.columns}))
            while isinstance(said, Said) and not said.is_done:
                if not progress.hear(self._encoded(said.text)):
                    progress.end("length")
                    break
                sampled = await self._turn(progress, ask)
                if sampled is None:
                    break
                (text,) = self._tokenizer.batch_decode(
                    [sampled.group.completions[0].token_ids.tolist()], skip_special_tokens=True
                )
                said = await progress.call(seat, Turn(text))
            if isinstance(said, Said) and said.is_done:
                progress.end("finished")
                progress.hear(self._encoded(said.text))
            if progress.state in REWARDED:
                rated = await progress.call(seat, Rate())
                progress.reward = rated.reward if isinstance(rated, Rated) else None
        return progress

    async def _turn(self, progress: "Progress", ask: Ask) -> Sampled | None:
        """The policy's next; None, and the state says why, where there is none, or where it was cut off."""
        token_ids = progress.recording.token_ids
        room = min(self._config.sampling.max_tokens, progress.max_tokens - len(token_ids))
        if progress.num_turns == self._config.environment.max_turns or room < 1:
            progress.end("max_turns" if room > 0 else "length")
            return None
        sampled = await ask(progress.asked(token_ids, room))
        if sampled is None:
            progress.end("aborted")
            return None
        progress.add(sampled)
        if sampled.group.completions[0].finish_reason == "length":
            progress.end("length")
            return None
        return sampled

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []


class Progress:
    """One episode while it is played."""

    def __init__(self, prompt: Prompt, number: int, max_tokens: int) -> None:
        self.prompt, self._number, self.max_tokens = prompt, number, max_tokens
        self.recording = Recording(np.array(prompt.token_ids, np.int32))
        self.state: EndState = "max_turns"
        self.reward: float | None = None
        self.entered_version: int | None = None
        self.num_turns = 0
        self._salt = self._endpoint = ""
        self._num_failed_calls = self._num_prompt_tokens = self._num_cached_tokens = 0
        self._environment_s = 0.0

    async def call(self, seat: Seat, order: Order) -> Said | Rated | None:
        """What the environment answers; None, and the state says why, where it does not."""
        started = time.monotonic()
        answer = await seat.ask(order)
        self._environment_s += time.monotonic() - started
        if isinstance(answer, Trouble):
            log.warning(
                "the environment of prompt %d: %s %s", self.prompt.prompt_id, type(order).__name__, answer.problem
            )
            self.end("tool_timeout" if answer.outcome == "timed_out" else "env_error")
            return None
        assert isinstance(answer, Said | Rated)
        if isinstance(answer, Said):
            self._num_failed_calls += answer.has_failed
        return answer

    def hear(self, token_ids: list[int]) -> bool:
        """Record what the environment said; False, and it is not, if there is no room for it."""
        has_room = len(self.recording.token_ids) + len(token_ids) <= self.max_tokens
        if has_room:
            self.recording.add_said(token_ids)
        return has_room

    def asked(self, token_ids: np.ndarray, max_tokens: int) -> Asked:
        return Asked(
            episode=self._number, number=self.num_turns, token_ids=token_ids, max_tokens=max_tokens,
            salt=self._salt, stays_at=self._endpoint,
        )  # fmt: skip

    def add(self, sampled: Sampled) -> None:
        """The turn that was asked for last."""
        group = sampled.group
        (completion,) = group.completions
        if self.num_turns:
            self._num_prompt_tokens += len(self.recording.token_ids)
            self._num_cached_tokens += group.num_cached_tokens
        else:
            self.entered_version, self._salt = group.entered_version, group.salt
        self._endpoint = sampled.endpoint
        self.num_turns += 1
        self.recording.add_turn(completion)

    def end(self, state: EndState) -> None:
        self.state = state
        self.recording.is_cut_off = state == "length"

    @property
    def episode(self) -> Episode:
        return Episode(
            branches=self.recording.branches(),
            course=Course(
                state=self.state,
                num_turns=self.num_turns,
                num_failed_calls=self._num_failed_calls,
                environment_s=self._environment_s,
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_tokens=self._num_cached_tokens,
            ),
            reward=self.reward,
        )
