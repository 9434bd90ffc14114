"""Play episodes: request turns from the servers and pass them to environments.

    prompt ─▶ reset ─▶ (turn: sampled from all tokens so far ─▶ commands ─▶ response, as tokens)* ─▶ reward
                       each response with the turn's reward and the name of the next state, if the class has them

This sits between the rollouts, which sample turns, and the pool of environments. `conversation.py` makes the
commands.
Invariant: every episode ends in a state of `episode.py`. Each turn has the server's deadline, each call of
the environment has its own, and their number is bounded.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from learner.config import LearnerConfig
from learner.environments.answer import UnreadableAnswer
from learner.environments.conversation import ChatConversation, NextPrompt, TextConversation
from learner.environments.episode import (
    REWARDED,
    EndState,
    Episode,
    EpisodeGroup,
    EpisodeStats,
    EpisodeTurn,
    Recording,
    group_of,
    state_name,
)
from learner.environments.host import Call, Command, Observe, Rate, Reset, RewardResult, StepResult, TurnFeedback
from learner.environments.process import Environments, Lease
from learner.prompts.chat_template import ChatTemplate
from learner.prompts.prompts import Prompt
from learner.prompts.tokenizer_threads import in_tokenizer_thread
from learner.sandbox.process import ProcessFailure
from protocol.errors import DataError
from protocol.messages import Group

log = logging.getLogger(__name__)


class TurnPrompt(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Request for one turn."""

    episode: int
    """Index of the episode in its group."""
    number: int
    """Index of the turn in its episode, from 0."""
    token_ids: np.ndarray
    max_tokens: int
    salt: str
    """Prefix-cache salt of the episode's first turn. Empty in the first turn."""
    stays_at: str
    """Endpoint of the server that sampled the previous turn and has its KV cache."""
    stop: tuple[str, ...] = ()
    """Stop texts of the turn, in addition to those of the run."""
    experts: np.ndarray | None = None
    """Routed experts of the first tokens, from earlier turns."""


class TurnResult(msgspec.Struct, frozen=True, eq=False):
    """A sampled turn: a group of one completion."""

    group: Group
    endpoint: str


Ask = Callable[[TurnPrompt], Awaitable[TurnResult | None]]
"""Function that samples a turn. None: no server could answer."""


class Player:
    """Player of one run's episodes. An episode's `max_tokens` includes its prompt."""

    def __init__(
        self, config: LearnerConfig, template: ChatTemplate, environments: Environments, asks_attributes: bool = False
    ) -> None:
        """Set up the player.

        `asks_attributes`: a reward function asks for the instances' attributes.
        """
        self._config, self._template, self._environments = config, template, environments
        self._rate = Rate(asks_attributes)

    async def play(
        self, group_id: str, prompt: Prompt, ask: Ask, *, num_episodes: int, max_tokens: int
    ) -> EpisodeGroup:
        """Play the group of a prompt. Episodes without a turn of the policy are left out."""
        played = await asyncio.gather(
            *(
                self._episode(Progress(prompt, episode, max_tokens, self._conversation_of(prompt)), ask)
                for episode in range(num_episodes)
            )
        )
        return group_of(group_id, [(progress.episode, progress.entered_version) for progress in played])

    async def _episode(self, progress: "Progress", ask: Ask) -> "Progress":
        async with self._environments.lease() as lease:
            opening = await progress.call(lease, Reset({**progress.prompt.columns, "prompt": progress.prompt.prompt}))
            if isinstance(opening, StepResult):
                if opening.is_done:
                    log.warning(
                        "an episode of prompt %d was over before its first turn: `done` is true after reset; set it to "
                        "False in reset, because an instance plays one episode after another",
                        progress.prompt.prompt_id,
                    )
                await self._converse(progress, lease, opening, ask)
            if progress.state in REWARDED:
                rated = await progress.call(lease, self._rate)
                if isinstance(rated, RewardResult):
                    progress.reward, progress.attributes = rated.reward, rated.attributes
        return progress

    async def _converse(self, progress: "Progress", lease: Lease, opening: StepResult, ask: Ask) -> None:
        """Play turn after turn, from the response to reset until the episode ends."""
        conversation = progress.conversation
        progress.give_up_at = time.monotonic() + self._config.environment.episode_deadline_s
        next_prompt, results = await in_tokenizer_thread(conversation.begin, opening), [opening]
        if not await progress.observe(lease, results):
            return None
        while not results[-1].is_done:
            if not progress.add_prompt(next_prompt):
                return progress.end("length")
            before = progress.recording.token_ids
            sampled = await self._turn(progress, ask)
            if sampled is None:
                return None
            (completion,) = sampled.group.completions
            token_ids = completion.token_ids.tolist()
            if completion.finish_reason == "length":
                await in_tokenizer_thread(conversation.cut_off, before.tolist(), token_ids)
                return progress.end("length")
            try:
                commands: Sequence[Command] = await in_tokenizer_thread(
                    conversation.commands_of, before.tolist(), token_ids
                )
            except UnreadableAnswer as error:
                log.debug("a turn of prompt %d: %s", progress.prompt.prompt_id, error)
                return progress.end("parse_error")
            if not commands:
                return progress.end("finished")
            answers = await progress.call_all(lease, commands)
            if answers is None or not await progress.observe(lease, answers):
                return None
            try:
                next_prompt, results = await in_tokenizer_thread(conversation.add_results, answers), answers
            except DataError as error:  # for example two calls, if the template allows one per turn
                log.debug("a turn of prompt %d: %s", progress.prompt.prompt_id, error)
                return progress.end("parse_error")
        progress.end("finished")
        progress.add_prompt(next_prompt)
        return None

    def _conversation_of(self, prompt: Prompt) -> TextConversation | ChatConversation:
        return (
            TextConversation(self._template)
            if isinstance(prompt.prompt, str)
            else ChatConversation(self._template, prompt.prompt)
        )

    async def _turn(self, progress: "Progress", ask: Ask) -> TurnResult | None:
        """Return the policy's next turn, or set the end state and return None."""
        if time.monotonic() >= progress.give_up_at:
            limit = f"{self._config.environment.episode_deadline_s:g} s (learner.environment.episode_deadline_s)"
            log.warning("an episode of prompt %d had not ended after %s", progress.prompt.prompt_id, limit)
            progress.end("deadline")
            return None
        token_ids = progress.recording.token_ids
        room = min(self._config.sampling.max_tokens, progress.max_tokens - len(token_ids))
        if progress.num_turns == self._config.environment.max_turns or room < 1:
            progress.end("max_turns" if room > 0 else "length")
            return None
        sampled = await ask(progress.turn_prompt(token_ids, room))
        if sampled is None:
            progress.end("aborted")
            return None
        progress.add_turn(sampled)
        return sampled


class Progress:
    """One episode in progress."""

    def __init__(
        self, prompt: Prompt, number: int, max_tokens: int, conversation: TextConversation | ChatConversation
    ) -> None:
        self.prompt, self._number, self.max_tokens, self.conversation = prompt, number, max_tokens, conversation
        self.recording = Recording(np.array(prompt.token_ids, np.int32))
        self.state: EndState = "max_turns"
        self.reward: float | None = None
        self.attributes: dict[str, Any] | None = None
        self.entered_version: int | None = None
        self.give_up_at = math.inf
        self.turns: list[EpisodeTurn] = []
        self._state: str | None = None
        """Name of the state in which the next turn begins."""
        self._has_feedback = False
        self._salt = self._endpoint = ""
        self._num_calls = self._num_failed_calls = self._num_prompt_tokens = self._num_cached_tokens = 0
        self._environment_s = 0.0

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    async def call(self, lease: Lease, command: Command) -> StepResult | TurnFeedback | RewardResult | None:
        """Return the environment's answer, or set the end state and return None."""
        self._num_calls += isinstance(command, Call)
        started = time.monotonic()
        answer = await lease.ask(command)
        self._environment_s += time.monotonic() - started
        if isinstance(answer, ProcessFailure):
            log.warning(
                "the environment of prompt %d: %s %s", self.prompt.prompt_id, type(command).__name__, answer.message
            )
            self.end("tool_timeout" if answer.outcome == "timed_out" else "env_error")
            return None
        assert isinstance(answer, StepResult | TurnFeedback | RewardResult)
        if isinstance(answer, StepResult):
            self._num_failed_calls += answer.has_failed
        return answer

    async def call_all(self, lease: Lease, commands: Sequence[Command]) -> list[StepResult] | None:
        """Return the responses to all commands, up to one that ends the episode.

        If a command fails, set the end state and return None.
        """
        results: list[StepResult] = []
        for command in commands:
            answer = await self.call(lease, command)
            if not isinstance(answer, StepResult):
                return None
            results.append(answer)
            if answer.is_done:
                break
        return results

    async def observe(self, lease: Lease, results: list[StepResult]) -> bool:
        """Record the reward of the last turn and the state after it, given the responses to the turn or to reset.

        A class that does not name its states is in the state that its texts describe, if there are any. If the
        class fails, set the end state and return False.
        """
        self._has_feedback |= results[0].has_feedback
        text = "".join(one.text for one in results)
        self._state = state_name(text) if text or not self.turns else None
        if not self._has_feedback:
            return True
        feedback = await self.call(lease, Observe(after_turn=bool(self.turns)))
        if not isinstance(feedback, TurnFeedback):
            return False
        if self.turns:
            self.turns[-1] = msgspec.structs.replace(self.turns[-1], reward=feedback.reward)
        if feedback.state is not None:
            self._state = state_name(feedback.state)
        return True

    def add_prompt(self, next_prompt: NextPrompt) -> bool:
        """Record the tokens before the next turn, or return False if they do not fit."""
        num_before = 0 if next_prompt.begins_branch else len(self.recording.token_ids)
        has_room = num_before + len(next_prompt.token_ids) <= self.max_tokens
        if has_room and next_prompt.begins_branch:
            self.recording.begin_branch(next_prompt.token_ids)
        elif has_room:
            self.recording.add_observation(next_prompt.token_ids)
        return has_room

    def turn_prompt(self, token_ids: np.ndarray, max_tokens: int) -> TurnPrompt:
        return TurnPrompt(
            episode=self._number, number=self.num_turns, token_ids=token_ids, max_tokens=max_tokens,
            salt=self._salt, stays_at=self._endpoint, experts=self.recording.experts,
        )  # fmt: skip

    def add_turn(self, sampled: TurnResult) -> None:
        """Add the turn that was requested last."""
        group = sampled.group
        if self.num_turns:
            self._num_prompt_tokens += len(self.recording.token_ids)
            self._num_cached_tokens += group.num_cached_tokens
        else:
            self.entered_version, self._salt = group.entered_version, group.salt
        self._endpoint = sampled.endpoint
        self.turns.append(EpisodeTurn(state=self._state))
        self.recording.add_turn(group)

    def end(self, state: EndState) -> None:
        self.state = state
        self.recording.is_cut_off = state == "length"

    @property
    def episode(self) -> Episode:
        return Episode(
            branches=self.recording.branches(),
            stats=EpisodeStats(
                state=self.state,
                num_turns=self.num_turns,
                num_calls=self._num_calls,
                num_failed_calls=self._num_failed_calls,
                environment_s=self._environment_s,
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_tokens=self._num_cached_tokens,
            ),
            reward=self.reward,
            turns=self.turns,
            messages=self.conversation.messages,
            attributes=self.attributes,
        )
