"""An episode: what the policy and an environment have said to each other in one go. Between the player and the ledger.

Invariant: every token of the policy stands here as the engine gave it, with its logprob and its version; what the environment said has
neither. A plain completion is an episode of one turn.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from learner.environments.branch import Branch
from protocol.messages import Completion, Group, Message, Part
from protocol.messages.parts import Version

EndState = Literal["finished", "length", "max_turns", "tool_timeout", "env_error", "aborted"]
"""finished: the environment was done; length: too many tokens, in a turn or in all; aborted: the server could not go on."""
REWARDED: tuple[EndState, ...] = ("finished", "length", "max_turns")
"""The others say nothing about the policy."""


class Course(Part, frozen=True):
    """How an episode went, beside its tokens."""

    state: EndState
    num_turns: int
    num_failed_calls: int = 0
    """Turns that the environment answered with an error's text."""
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
    """The branch of an episode that is being played."""

    def __init__(self, prompt_token_ids: np.ndarray) -> None:
        self._prompt_token_ids = prompt_token_ids
        self._token_ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[tuple[Version | None, int]] = []
        self.is_cut_off = False

    @property
    def token_ids(self) -> np.ndarray:
        """All that the next turn's prompt is, exactly."""
        return np.concatenate([self._prompt_token_ids, *self._token_ids])

    def add_turn(self, completion: Completion) -> None:
        """What the policy has sampled."""
        self._token_ids.append(completion.token_ids)
        self._logprobs.append(completion.behaviour_logprobs)
        self._versions += completion.versions

    def add_said(self, token_ids: Sequence[int]) -> None:
        """What the environment says."""
        if token_ids:
            self._token_ids.append(np.array(token_ids, np.int32))
            self._logprobs.append(np.zeros(len(token_ids), np.float32))
            self._versions.append((None, len(token_ids)))

    def branches(self) -> list[Branch]:
        """None where the policy has said nothing."""
        if all(version is None for version, _ in self._versions):
            return []
        return [
            Branch(
                token_ids=np.concatenate(self._token_ids),
                behaviour_logprobs=np.concatenate(self._logprobs),
                versions=self._versions,
                finish_reason="length" if self.is_cut_off else "stop",
            )
        ]


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
