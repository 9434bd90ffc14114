"""An episode that an agent plays: what it asks goes to the servers, what comes is recorded as it came.

    a request's tokens ─▶ turn ─▶ (servers) ─▶ record: it extends a branch, token for token, or begins one          agent_player.py ends it

Between the gateway and the rollouts. Invariant: every token of the policy that the agent was given stands in exactly one branch, with the
engine's logprob and version, however many requests are made at once and in whatever order they are answered.
"""

import asyncio
import time
import uuid

import msgspec
import numpy as np

from learner.config import LearnerConfig
from learner.environments.episode import REWARDED, Course, EndState, Episode, RecordedBranch
from learner.environments.player import Ask, Asked, Sampled
from learner.environments.process import Trouble
from learner.gateway.messages import starts_with
from learner.gateway.places import Places
from learner.gateway.refusal import Refused, episode_over
from learner.prompts.chat_template import Message
from learner.prompts.prompts import Prompt
from protocol.messages import Completion


class Turn(msgspec.Struct, frozen=True, eq=False):
    """What the policy said when it was asked."""

    turn_id: str
    prompt: list[int]
    completion: Completion
    num_cached_tokens: int

    @property
    def token_ids(self) -> list[int]:
        return self.completion.token_ids.tolist()

    @property
    def is_cut_off(self) -> bool:
        return self.completion.finish_reason == "length"


class Session:
    """Of one episode, in the learner's event loop; `max_tokens` are counted with the prompt, in each branch."""

    def __init__(self, config: LearnerConfig, prompt: Prompt, number: int, ask: Ask, max_tokens: int) -> None:
        self._config, self._prompt, self._number, self._ask = config, prompt, number, ask
        self._max_tokens = max_tokens
        self.places = Places()
        self.turn_ids: set[str] = set()
        self.num_calls = 0
        self.state: EndState | None = None
        """None: it goes on."""
        self.reward: float | None = None
        self.entered_version: int | None = None
        self._branches: list[RecordedBranch] = []
        """The one that had a turn last stands last."""
        self._limit: EndState | None = None
        """What its last request was refused for."""
        self._is_cut_off = False
        self._num_asked = 0
        self._under_way: set[asyncio.Future[Sampled | None]] = set()
        self._salt = self._endpoint = ""
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._clock = Clock()

    async def turn(self, token_ids: list[int], max_tokens: int, stop: tuple[str, ...]) -> Turn:
        """Ask the policy. Raises Refused."""
        room = min(max_tokens, self._room_behind(token_ids))
        asked = Asked(
            episode=self._number, number=self._num_asked, token_ids=np.array(token_ids, np.int32), max_tokens=room,
            salt=self._salt, stays_at=self._endpoint, stop=stop,
        )  # fmt: skip
        self._num_asked += 1
        sampled = await self._answer_to(asked)
        if self.state is not None:
            raise episode_over(self.state)
        if sampled is None:
            self._limit = "aborted"
            raise Refused(
                "no server could answer, the episode ends here; the learner's log says why", code="aborted", status=503
            )
        group = sampled.group
        (completion,) = group.completions
        self._endpoint, self._salt = sampled.endpoint, self._salt or group.salt
        if self.entered_version is None or group.entered_version < self.entered_version:
            self.entered_version = group.entered_version
        return Turn(uuid.uuid4().hex, token_ids, completion, group.num_cached_tokens)

    async def _answer_to(self, asked: Asked) -> Sampled | None:
        """Raises Refused where the episode ends before it comes; cancelled, the servers are told that nobody waits."""
        asking = asyncio.ensure_future(self._ask(asked))
        self._under_way.add(asking)
        try:
            with self._clock:
                return await asking
        except asyncio.CancelledError:
            if self.state is None:  # the agent no longer waits for it
                raise
            raise episode_over(self.state) from None
        finally:
            self._under_way.discard(asking)

    def record(self, turn: Turn) -> None:
        """What the agent is given: the turn follows the longest branch that its prompt extends."""
        if self.turn_ids:
            self._num_prompt_tokens += len(turn.prompt)
            self._num_cached_tokens += turn.num_cached_tokens
        self.turn_ids.add(turn.turn_id)
        prompt, completion = np.array(turn.prompt, np.int32), turn.completion
        branch = self._extended(prompt)
        if branch is None:
            is_own = not np.array_equal(prompt, self._prompt.token_ids)
            branch = RecordedBranch(prompt, is_own_prompt=is_own)
        else:
            self._branches.remove(branch)
            said = prompt[len(branch.all_token_ids) :]
            if len(said):
                branch.add(said, np.zeros(len(said), np.float32), [(None, len(said))])
        branch.add(completion.token_ids, completion.behaviour_logprobs, completion.versions)
        self._branches.append(branch)
        self._is_cut_off = turn.is_cut_off
        if self._limit == "length":  # of another branch
            self._limit = None

    def leave(self) -> EndState:
        """Nobody may ask any more, and what is asked is given up; return the state that it has ended in."""
        self.state = self.state or "aborted"
        for asking in self._under_way:
            asking.cancel()
        return self.state

    def end(self, outcome: float | Trouble | None) -> None:
        """The agent has said what it is worth, or nothing, or never will."""
        if isinstance(outcome, Trouble):
            has_raised = outcome.outcome == "failed"  # as one does that is refused a turn
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
            course=Course(
                state=self.state,
                num_turns=len(self.turn_ids),
                num_calls=self.num_calls,
                environment_s=self._clock.idle_s,
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_tokens=self._num_cached_tokens,
            ),
            reward=self.reward,
            messages=self._messages(),
        )

    def _room_behind(self, token_ids: list[int]) -> int:
        """Tokens that a turn may have. Raises Refused."""
        if self.state is not None:
            raise episode_over(self.state)
        max_turns = self._config.environment.max_turns
        if self._num_asked >= max_turns:
            self._limit = "max_turns"
            raise Refused(
                f"the episode has had {max_turns} turns, its most (learner.environment.max_turns); return, or raise that key",
                code="max_turns",
                status=410,
            )
        if not token_ids:
            raise Refused("the prompt has no tokens; expected at least one")
        room = self._max_tokens - len(token_ids)
        if room < 1:
            self._limit = "length"
            raise Refused(
                f"the prompt has {len(token_ids)} tokens, and an episode at most {self._max_tokens} (learner.environment.max_episode_tokens, "
                "or the server's max_model_len); ask with less, or return",
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
        """What was said after the row's prompt, where that converses."""
        said, prompt = self.places.last_messages, self._prompt.prompt
        if isinstance(prompt, str) or not said:
            return []
        if starts_with(said, prompt):
            return said[len(prompt) :]
        return said[next(number for number, message in enumerate(said) if message["role"] == "assistant") :]


class Clock:
    """How long an episode has gone on without a request that is being answered."""

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
