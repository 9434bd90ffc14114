"""Episode: one exchange between the policy and an environment, as sequences of tokens (branches).

    prompt ▸ turn ▸ answer ▸ turn ▸ …    one branch while each turn's prompt extends the recorded tokens,
                                         otherwise the next turn starts a branch with its own prompt

This sits between the player and the ledger. A plain completion is an episode with one branch of one turn.
Invariant: every policy token is stored as the engine returned it, with its logprob and version. A token that the
policy did not sample has neither, so it is in no loss, logprob, KL or count. Only later tokens attend to it.
"""

import hashlib
import logging
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from protocol.messages import Completion, Group, Message, Part
from protocol.messages.parts import Version, check_array, check_experts

log = logging.getLogger(__name__)
UNKNOWN_VERSION = -1
"""Version of groups from before a restart.

A version that is trained again may have other weights under the same number.
"""
EndState = Literal["finished", "length", "max_turns", "parse_error", "tool_timeout", "env_error", "deadline", "aborted"]
"""End state of an episode.

- finished: the environment was done, or the policy called no tool
- length: too many tokens, in a turn or in the episode
- parse_error: the policy called a tool in an unreadable way
- deadline: the episode took too long as a whole
- aborted: the server could not continue
"""
REWARDED: tuple[EndState, ...] = ("finished", "length", "max_turns", "parse_error")
"""End states that are rewarded. The other states are no evidence about the policy."""
MAX_STATE_CHARACTERS = 64
"""Length above which the name of a state is replaced by its digest."""
NOT_SAMPLED = -1
"""Turn of a token that the policy did not sample."""


class TokenSequence(Part, frozen=True, omit_defaults=True):
    """Tokens after a prompt in one sequence.

    Example: token_ids=[7, 3, 9, 1], behavior_logprobs=[-0.2, -1.1, 0, -0.1], versions=[(4, 2), (None, 1),
    (5, 1)], turns=[(0, 2), (1, 1)]. Policy version 4 sampled a turn of two tokens. One token of an environment
    follows, then a turn of one token by version 5.
    """

    token_ids: np.ndarray
    behavior_logprobs: np.ndarray = msgspec.field(name="behaviour_logprobs")  # as ledgers of earlier releases spell it
    """Behavior logprobs, 0 for tokens that were not sampled."""
    versions: list[tuple[Version | None, int]]
    """Runs of tokens, each with the version that sampled it. None: the policy did not sample it."""
    finish_reason: str
    """Reason for the end. "length": the episode was cut off."""
    prompt_token_ids: np.ndarray | None = None
    """The branch's own prompt. None: the group's prompt."""
    turns: list[tuple[int, int]] = msgspec.field(default_factory=list)
    """Turns in the sequence: the index of the turn in its episode, and its number of tokens. Empty: one turn."""
    reference_logprobs: np.ndarray | None = None
    """Logprobs from the reference's server, of every token. None: the learner computes them, or needs none."""
    experts: np.ndarray | None = None
    """Routed experts of the first tokens, as Completion has them. The last turn's last token has none."""
    prompt_experts: np.ndarray | None = None
    """Routed experts of the prompt. None: those of the group, if it has any."""

    def __post_init__(self) -> None:
        check_array(self.token_ids, "int32", "token_ids")
        check_array(self.behavior_logprobs, "float32", "behavior_logprobs")
        if self.turns and (in_turns := sum(count for _, count in self.turns)) != self.num_sampled:
            raise ValueError(f"turns of {in_turns} tokens; expected the {self.num_sampled} sampled tokens")
        if self.reference_logprobs is not None:
            check_array(self.reference_logprobs, "float32", "reference_logprobs")
            if len(self.reference_logprobs) != len(self.token_ids):
                raise ValueError(f"{len(self.token_ids)} tokens but {len(self.reference_logprobs)} reference logprobs")
        covered = sum(count for _, count in self.versions)
        if not len(self.token_ids) == len(self.behavior_logprobs) == covered:
            raise ValueError(
                f"{len(self.token_ids)} token ids, {len(self.behavior_logprobs)} behavior logprobs and versions of "
                f"{covered} tokens; expected the same number of each"
            )
        for field, experts in {"experts": self.experts, "prompt_experts": self.prompt_experts}.items():
            if experts is not None:
                check_experts(experts, field)

    @classmethod
    def of(cls, completion: Completion) -> "TokenSequence":
        """Return a plain completion as a branch, all of which the policy sampled."""
        return cls(
            token_ids=completion.token_ids,
            behavior_logprobs=completion.behavior_logprobs,
            versions=list(completion.versions),
            finish_reason=completion.finish_reason,
            experts=completion.experts,
        )

    @property
    def versions_T(self) -> np.ndarray:
        """The version of each token, or UNKNOWN_VERSION if it was not sampled."""
        versions = [UNKNOWN_VERSION if version is None else version for version, _ in self.versions]
        return np.repeat(versions, [count for _, count in self.versions])

    @property
    def is_sampled_T(self) -> np.ndarray:
        return np.repeat([version is not None for version, _ in self.versions], [count for _, count in self.versions])

    @property
    def turn_T(self) -> np.ndarray:
        """The index of the turn that each token belongs to, or NOT_SAMPLED."""
        turn_T = np.where(self.is_sampled_T, 0, NOT_SAMPLED)
        if self.turns:
            turn_T[turn_T != NOT_SAMPLED] = np.repeat([turn for turn, _ in self.turns], [n for _, n in self.turns])
        return turn_T

    @property
    def num_sampled(self) -> int:
        return sum(count for version, count in self.versions if version is not None)

    @property
    def sampled_versions(self) -> list[int]:
        return [version for version, _ in self.versions if version is not None]


class EpisodeStats(Part, frozen=True):
    """Statistics of an episode, apart from its tokens."""

    state: EndState
    num_turns: int
    num_calls: int = 0
    """Number of tool calls."""
    num_failed_calls: int = 0
    """Number of turns or calls that got an error text as their answer."""
    environment_s: float = 0.0
    """Seconds spent in the environment."""
    num_prompt_tokens: int = 0
    """Number of prompt tokens of all turns after the first. Each prompt includes the turns before it."""
    num_cached_tokens: int = 0
    """Number of these tokens that the server had in its KV cache."""


class EpisodeTurn(Part, frozen=True):
    """One turn of an episode, apart from its tokens."""

    reward: float | None = None
    """Reward of the turn, included in the environment's reward of the episode. None: the turn has none."""
    state: str | None = None
    """Name of the state in which the turn began, equal in episodes of a group that were in the same state.
    None: unknown."""


class Episode(Part, frozen=True):
    """One rollout, with its reward from the environment.

    Example: branches=[one of two turns], stats=EpisodeStats(state="finished", num_turns=2), reward=1.0.
    """

    branches: list[TokenSequence]
    stats: EpisodeStats = msgspec.field(name="course")
    reward: float | None = None
    """The environment's own reward, including those of the turns."""
    turns: list[EpisodeTurn] = msgspec.field(default_factory=list)
    """The turns, in the order in which they were recorded. Empty: one turn without a reward."""
    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """Messages of the policy and its tools after the prompt, if the prompt is a conversation."""
    attributes: dict[str, Any] | None = None
    """Final attributes of the environment's instance, if a reward function requests them."""


class EpisodeGroup(Message, frozen=True, tag="PlayedGroup"):
    """Episodes of one prompt, as the ledger stores them."""

    group_id: str
    entered_version: int
    """The lowest version under which a turn entered the engine."""
    episodes: list[Episode]

    @property
    def oldest_version(self) -> int:
        return min(version for one in self.episodes for branch in one.branches for version in branch.sampled_versions)


def group_of(group_id: str, played: Sequence[tuple[Episode, int | None]]) -> EpisodeGroup:
    """Return the group of played episodes, each with the version under which it entered an engine.

    Episodes without a turn of the policy are left out.
    """
    for episode, _ in played:
        if episode.stats.state not in REWARDED:
            log.warning("an episode of group %s ended as %s", group_id, episode.stats.state)
    return EpisodeGroup(
        group_id=group_id,
        entered_version=min((version for _, version in played if version is not None), default=0),
        episodes=[episode for episode, _ in played if episode.branches],
    )


AnyGroup = Group | EpisodeGroup
"""A group as a server returned it, or as it was played."""


def num_sampled(group: AnyGroup) -> int:
    """Return the number of tokens that the policy sampled."""
    if isinstance(group, EpisodeGroup):
        return sum(branch.num_sampled for one in group.episodes for branch in one.branches)
    return sum(len(completion.token_ids) for completion in group.completions)


def episodes_of(group: AnyGroup) -> list[Episode]:
    """Return the episodes of a group. A plain completion is an episode of one turn."""
    if isinstance(group, EpisodeGroup):
        return group.episodes
    return [
        Episode(
            branches=[TokenSequence.of(completion)],
            stats=EpisodeStats(state="length" if completion.finish_reason == "length" else "finished", num_turns=1),
        )
        for completion in group.completions
    ]


def state_name(text: str) -> str:
    """Return a text as the name of a state, or its digest if it is long."""
    return text if len(text) <= MAX_STATE_CHARACTERS else f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def turn_experts(known: np.ndarray | None, turn: Group) -> np.ndarray | None:
    """Return the routed experts of a turn's prompt and completion, or None if the server returned none.

    `known` are those of the first tokens, which the server has left out.
    """
    (completion,) = turn.completions
    parts = [part for part in (known, turn.prompt_experts, completion.experts) if part is not None]
    return None if completion.experts is None else np.concatenate(parts)


class Recording:
    """Branches of an episode in progress. Turns are added to the last branch."""

    def __init__(self, prompt_token_ids: np.ndarray) -> None:
        self._branches = [RecordedBranch(prompt_token_ids, is_own_prompt=False)]
        self._num_turns = 0
        self.is_cut_off = False

    @property
    def token_ids(self) -> np.ndarray:
        """The exact prompt of the next turn."""
        return self._branches[-1].all_token_ids

    @property
    def experts(self) -> np.ndarray | None:
        """Routed experts of the first tokens of this prompt, if known."""
        return self._branches[-1].experts

    def begin_branch(self, prompt_token_ids: Sequence[int]) -> None:
        """Start a branch with its own prompt. Later tokens go to this branch."""
        self._branches.append(RecordedBranch(np.array(prompt_token_ids, np.int32), is_own_prompt=True))

    def add_turn(self, turn: Group) -> None:
        """Add the tokens that the policy sampled."""
        self._branches[-1].add_turn(self._num_turns, turn.completions[0], turn_experts(self.experts, turn))
        self._num_turns += 1

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Add the tokens of the environment."""
        self._branches[-1].add_observation(np.array(token_ids, np.int32))

    def branches(self) -> list[TokenSequence]:
        """Return the branches that contain a turn of the policy."""
        spoken = [branch for branch in self._branches if branch.has_turns]
        return [branch.recorded("length" if self.is_cut_off and branch is spoken[-1] else "stop") for branch in spoken]


class RecordedBranch:
    """A branch in progress, which grows after its prompt."""

    def __init__(self, prompt_token_ids: np.ndarray, *, is_own_prompt: bool) -> None:
        self._prompt_token_ids, self._is_own_prompt = prompt_token_ids, is_own_prompt
        self._token_ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._versions: list[tuple[Version | None, int]] = []
        self._turns: list[tuple[int, int]] = []
        self.experts: np.ndarray | None = None
        """Routed experts of the first tokens, the prompt included."""

    @property
    def all_token_ids(self) -> np.ndarray:
        return np.concatenate([self._prompt_token_ids, *self._token_ids])

    @property
    def has_turns(self) -> bool:
        return bool(self._turns)

    def add_turn(self, turn: int, completion: Completion, experts: np.ndarray | None) -> None:
        """Add the tokens that the policy sampled in a turn of the episode, given by its index.

        `experts` are the routed experts of all tokens but the last. A token keeps those of the turn that computed it
        first: its own logprob belongs to them.
        """
        self._token_ids.append(completion.token_ids)
        self._logprobs.append(completion.behavior_logprobs)
        self._versions += completion.versions
        self._turns.append((turn, len(completion.token_ids)))
        if experts is not None and self.experts is not None:
            experts = np.concatenate([self.experts, experts[len(self.experts) :]])
        self.experts = experts

    def add_observation(self, token_ids: np.ndarray) -> None:
        """Add tokens that the policy did not sample."""
        if count := len(token_ids):
            self._token_ids.append(token_ids)
            self._logprobs.append(np.zeros(count, np.float32))
            self._versions.append((None, count))

    def recorded(self, finish_reason: str) -> TokenSequence:
        num_prompt = len(self._prompt_token_ids)
        return TokenSequence(
            token_ids=np.concatenate(self._token_ids),
            behavior_logprobs=np.concatenate(self._logprobs),
            versions=self._versions,
            finish_reason=finish_reason,
            prompt_token_ids=self._prompt_token_ids if self._is_own_prompt else None,
            turns=self._turns,
            experts=None if self.experts is None else self.experts[num_prompt:],
            prompt_experts=None if self.experts is None else self.experts[:num_prompt],
        )
