"""An agent's episode: send its requests to the servers and record the turns.

    a request's tokens ─▶ turn ─▶ (servers) ─▶ record: extend a branch or start one    players.py ends it

This sits between the gateway and the rollouts.
Invariant: every policy token that the agent received is in exactly one branch, with the engine's logprob and
version. This holds for concurrent requests in any order of their answers.
"""

import asyncio
import hashlib
import time
import uuid
from contextlib import suppress

import msgspec
import numpy as np

from learner.config import LearnerConfig
from learner.environments.episode import (
    REWARDED,
    EndState,
    Episode,
    EpisodeStats,
    EpisodeTurn,
    RecordedBranch,
    turn_experts,
)
from learner.environments.player import Ask, TurnPrompt, TurnResult
from learner.gateway.messages import RefusedRequest, episode_over, read_messages, starts_with
from learner.gateway.prefix_index import PrefixIndex
from learner.prompts.chat_template import Message
from learner.prompts.prompts import Prompt
from learner.sandbox.process import ProcessFailure
from protocol.messages import Completion


class SessionTurn(msgspec.Struct, frozen=True, eq=False):
    """A sampled turn."""

    turn_id: str
    prompt: np.ndarray
    completion: Completion
    num_cached_tokens: int
    experts: np.ndarray | None = None
    """Routed experts of the prompt and of the completion but its last token."""

    @property
    def token_ids(self) -> list[int]:
        return self.completion.token_ids.tolist()

    @property
    def all_token_ids(self) -> np.ndarray:
        """The tokens of the prompt and the turn."""
        return np.concatenate([self.prompt, self.completion.token_ids])

    @property
    def is_cut_off(self) -> bool:
        return self.completion.finish_reason == "length"


class Session:
    """Session of one episode, used in the learner's event loop.

    `max_tokens` applies to each branch and includes the prompt.
    """

    def __init__(self, config: LearnerConfig, prompt: Prompt, number: int, ask: Ask, max_tokens: int) -> None:
        self._config, self._prompt, self._number, self._ask = config, prompt, number, ask
        self._max_tokens = max_tokens
        self.prefixes = PrefixIndex()
        self.turns: dict[str, EpisodeTurn] = {}
        """Recorded turns by id, in order."""
        self.num_calls = 0
        self.state: EndState | None = None
        """End state. None: the episode is in progress."""
        self.reward: float | None = None
        self.entered_version: int | None = None
        self._branches: list[RecordedBranch] = []
        """Branches, with the one that had the last turn at the end."""
        self._limit: EndState | None = None
        """End state that the last refused request implies."""
        self._is_cut_off = False
        self._num_turns = 0
        self._under_way: set[asyncio.Future[TurnResult | None]] = set()
        self._salt = self._endpoint = ""
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._clock = Clock()

    async def turn(self, token_ids: np.ndarray, max_tokens: int, stop: tuple[str, ...]) -> SessionTurn:
        """Sample a turn of the policy. Raises RefusedRequest if there is none."""
        room = min(max_tokens, self._room_behind(token_ids))
        extended = self._extended(token_ids)
        prompt = TurnPrompt(
            episode=self._number, number=self._num_turns, token_ids=token_ids, max_tokens=room,
            salt=self._salt, stays_at=self._endpoint, stop=stop, experts=None if extended is None else extended.experts,
        )  # fmt: skip
        self._num_turns += 1
        sampled = await self._answer_to(prompt)
        if self.state is not None:
            raise episode_over(self.state)
        if sampled is None:
            self._limit = "aborted"
            raise RefusedRequest(
                "no server could answer, so the episode ends; see the learner's log", code="aborted", status=503
            )
        group = sampled.group
        (completion,) = group.completions
        self._endpoint, self._salt = sampled.endpoint, self._salt or group.salt
        if self.entered_version is None or group.entered_version < self.entered_version:
            self.entered_version = group.entered_version
        experts = turn_experts(prompt.experts, group)
        return SessionTurn(uuid.uuid4().hex, token_ids, completion, group.num_cached_tokens, experts)

    async def _answer_to(self, prompt: TurnPrompt) -> TurnResult | None:
        """Return the servers' answer.

        Canceling this call cancels the request at the servers.

        Raises:
            RefusedRequest: The episode ends first.
        """
        task = asyncio.ensure_future(self._ask(prompt))
        self._under_way.add(task)
        try:
            with self._clock:
                return await task
        except asyncio.CancelledError:
            if self.state is None:  # the agent no longer waits
                raise
            raise episode_over(self.state) from None
        finally:
            self._under_way.discard(task)

    def record(self, turn: SessionTurn) -> None:
        """Record a turn that the agent receives, in the longest branch it extends.

        Turns with the same prompt begin in the same state.

        Raises:
            RefusedRequest: The episode has ended meanwhile.
        """
        if self.state is not None:
            raise episode_over(self.state)
        if self.turns:
            self._num_prompt_tokens += len(turn.prompt)
            self._num_cached_tokens += turn.num_cached_tokens
        number = len(self.turns)
        prompt, completion = turn.prompt, turn.completion
        self.turns[turn.turn_id] = EpisodeTurn(state=hashlib.sha256(prompt.tobytes()).hexdigest()[:32])
        branch = self._extended(prompt)
        if branch is None:
            is_own = not np.array_equal(prompt, self._prompt.token_ids)
            branch = RecordedBranch(prompt, is_own_prompt=is_own)
        else:
            self._branches.remove(branch)
            branch.add_observation(prompt[len(branch.all_token_ids) :].copy())  # a view would keep the whole prompt
        branch.add_turn(number, completion, turn.experts)
        self._branches.append(branch)
        self._is_cut_off = turn.is_cut_off
        if self._limit == "length":  # the limit was that of another branch
            self._limit = None

    def leave(self) -> EndState:
        """Close the session, cancel pending requests, and return the end state."""
        self.state = self.state or "aborted"
        for task in self._under_way:
            task.cancel()
        return self.state

    def rate_turns(self, rewards: dict[str, float]) -> None:
        """Set the rewards of turns, by their ids."""
        for turn_id, reward in rewards.items():
            self.turns[turn_id] = msgspec.structs.replace(self.turns[turn_id], reward=reward)

    def end(self, outcome: float | ProcessFailure | None) -> None:
        """Set the end state and the reward from the agent's outcome."""
        if isinstance(outcome, ProcessFailure):
            has_raised = outcome.outcome == "failed"  # an agent may raise because it was refused a turn
            of_agent: EndState = "deadline" if outcome.outcome == "timed_out" else "env_error"
            self.state = (has_raised and self._limit) or of_agent
            return
        self.state = self._limit or ("length" if self._is_cut_off else "finished")
        self.reward = outcome if self.state in REWARDED else None

    @property
    def episode(self) -> Episode:
        assert self.state is not None
        is_cut_off = self.state == "length"
        return Episode(
            branches=[
                one.recorded("length" if is_cut_off and one is self._branches[-1] else "stop") for one in self._branches
            ],
            stats=EpisodeStats(
                state=self.state,
                num_turns=len(self.turns),
                num_calls=self.num_calls,
                environment_s=self._clock.idle_s,
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_tokens=self._num_cached_tokens,
            ),
            reward=self.reward,
            turns=list(self.turns.values()),
            messages=self._messages(),
        )

    def _room_behind(self, token_ids: np.ndarray) -> int:
        """Return the number of tokens that a turn may have.

        Raises:
            RefusedRequest: The episode cannot have another turn.
        """
        if self.state is not None:
            raise episode_over(self.state)
        max_turns = self._config.environment.max_turns
        if self._num_turns >= max_turns:
            self._limit = "max_turns"
            raise RefusedRequest(
                f"the episode has had its {max_turns} turns (learner.environment.max_turns); return, or raise that key "
                "in a new run",
                code="max_turns",
                status=410,
            )
        if not len(token_ids):
            raise RefusedRequest("the prompt has no tokens; expected at least one")
        room = self._max_tokens - len(token_ids)
        if room < 1:
            self._limit = "length"
            # Agents know this case by the words of OpenAI's and Anthropic's own errors.
            raise RefusedRequest(
                f"This model's maximum context length is {self._max_tokens} tokens "
                "(learner.environment.max_episode_tokens, or the server's max_model_len), and the prompt is too long: "
                f"{len(token_ids)} tokens > {self._max_tokens} maximum; send fewer tokens, or return",
                code="context_length_exceeded",
            )
        return room

    def _extended(self, prompt: np.ndarray) -> RecordedBranch | None:
        longest: RecordedBranch | None = None
        for branch in self._branches:
            recorded = branch.all_token_ids
            if np.array_equal(recorded, prompt[: len(recorded)]) and (
                longest is None or len(recorded) > len(longest.all_token_ids)
            ):
                longest = branch
        return longest

    def _messages(self) -> list[Message]:
        """Return the messages after the row's prompt, or none for a text prompt."""
        messages, prompt = self.prefixes.last_messages, self._prompt.prompt
        if isinstance(prompt, str) or not messages:
            return []
        with suppress(RefusedRequest):  # no agent can send such a prompt unchanged
            known = read_messages([("the prompt", message) for message in prompt], "prompt")
            if starts_with(messages, known):
                return messages[len(known) :]
        return messages[next(number for number, message in enumerate(messages) if message["role"] == "assistant") :]


class Clock:
    """Time that an episode has spent without a pending request."""

    def __init__(self) -> None:
        self._num_waiting, self._since, self._idle_s = 0, time.monotonic(), 0.0

    @property
    def idle_s(self) -> float:
        return self._idle_s + (0.0 if self._num_waiting else time.monotonic() - self._since)

    def __enter__(self) -> None:
        if not self._num_waiting:
            self._idle_s = self.idle_s
        self._num_waiting += 1

    def __exit__(self, *exception: object) -> None:
        self._num_waiting -= 1
        self._since = time.monotonic()
