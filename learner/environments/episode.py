"""An episode: what the policy and an environment have said to each other in one go. Between the player and the ledger.

Invariant: every token of the policy stands here as the engine gave it, with its logprob and its version; what the environment said has
neither. A plain completion is an episode of one turn.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from learner.environments.branch import Branch
from protocol.messages import Completion, Group, Message, Part
from protocol.messages.parts import Version

EndState = Literal["finished", "length", "max_turns", "parse_error", "tool_timeout", "env_error", "deadline", "aborted"]
"""finished: the environment was done, or the policy called no tool; length: too many tokens, in a turn or in all; parse_error: the
policy called a tool in a way that nobody can read; deadline: it took too long in all; aborted: the server could not go on."""
REWARDED: tuple[EndState, ...] = ("finished", "length", "max_turns", "parse_error")
"""The others say nothing about the policy."""


class Course(Part, frozen=True):
    """How an episode went, beside its tokens."""

    state: EndState
    num_turns: int
    num_calls: int = 0
    """Of tools."""
    num_failed_calls: int = 0
    """Turns or calls that were answered with an error's text."""
    environment_s: float = 0.0
    """Spent in the environment."""
    num_prompt_tokens: int = 0
    """Of the requests of all turns after the first, which have the turns before them."""
    num_cached_tokens: int = 0
    """Of these, whose keys and values the server still had."""


class Episode(Part, frozen=True):
    """Example: branches=[one of two turns], course=Course(state="finished", num_turns=2), reward=1.0."""

    branches: list[Branch]
    course: Course
    reward: float | None = None
    """The environment's own."""
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """What was said after a prompt that is a conversation, by the policy and its tools."""
    attributes: dict[str, Any] | None = None
    """What the environment's instance held at the end, where a reward function asks for it."""


class PlayedGroup(Message, frozen=True):
    """The episodes of one prompt: what the ledger keeps of them."""

    group_id: str
    entered_version: int
    """The lowest that a turn entered under."""
    episodes: list[Episode]

    @property
    def oldest_version(self) -> int:
        return min(version for one in self.episodes for branch in one.branches for version in branch.sampled_versions)


AnyGroup = Group | PlayedGroup
"""A group as it came from a server, or as it was played."""


class Recording:
    """The branches of an episode that is being played; the last is the one that turns are added to."""

    def __init__(self, prompt_token_ids: np.ndarray) -> None:
        self._branches = [RecordedBranch(prompt_token_ids, is_own_prompt=False)]
        self.is_cut_off = False

    @property
    def token_ids(self) -> np.ndarray:
        """All that the next turn's prompt is, exactly."""
        return self._branches[-1].all_token_ids

    def begin_branch(self, prompt_token_ids: Sequence[int]) -> None:
        """From here on another prompt stands before what is said."""
        self._branches.append(RecordedBranch(np.array(prompt_token_ids, np.int32), is_own_prompt=True))

    def add_turn(self, completion: Completion) -> None:
        """What the policy has sampled."""
        self._branches[-1].add(completion.token_ids, completion.behaviour_logprobs, completion.versions)

    def add_said(self, token_ids: Sequence[int]) -> None:
        """What the environment says."""
        if token_ids:
            count = len(token_ids)
            self._branches[-1].add(np.array(token_ids, np.int32), np.zeros(count, np.float32), [(None, count)])

    def branches(self) -> list[Branch]:
        """Those in which the policy has said something."""
        spoken = [branch for branch in self._branches if branch.has_turns]
        return [branch.recorded("length" if self.is_cut_off and branch is spoken[-1] else "stop") for branch in spoken]


class RecordedBranch:
    """Grows behind its prompt."""

    def __init__(self, prompt_token_ids: np.ndarray, *, is_own_prompt: bool) -> None:
        self._prompt_token_ids, self._is_own_prompt = prompt_token_ids, is_own_prompt
        self._token_ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[tuple[Version | None, int]] = []

    @property
    def all_token_ids(self) -> np.ndarray:
        return np.concatenate([self._prompt_token_ids, *self._token_ids])

    @property
    def has_turns(self) -> bool:
        return any(version is not None for version, _ in self._versions)

    def add(self, token_ids: np.ndarray, logprobs: np.ndarray, versions: Sequence[tuple[Version | None, int]]) -> None:
        self._token_ids.append(token_ids)
        self._logprobs.append(logprobs)
        self._versions += versions

    def recorded(self, finish_reason: str) -> Branch:
        return Branch(
            token_ids=np.concatenate(self._token_ids),
            behaviour_logprobs=np.concatenate(self._logprobs),
            versions=self._versions,
            finish_reason=finish_reason,
            prompt_token_ids=self._prompt_token_ids if self._is_own_prompt else None,
        )


def num_sampled(group: AnyGroup) -> int:
    """Tokens of the policy."""
    if isinstance(group, PlayedGroup):
        return sum(branch.num_sampled for one in group.episodes for branch in one.branches)
    return sum(len(completion.token_ids) for completion in group.completions)


def episodes_of(group: AnyGroup) -> list[Episode]:
    """A plain completion is an episode of one turn, without an environment."""
    if isinstance(group, PlayedGroup):
        return group.episodes
    return [
        Episode(
            branches=[Branch.of(completion)],
            course=Course(state="length" if completion.finish_reason == "length" else "finished", num_turns=1),
        )
        for completion in group.completions
    ]
