"""What a server is asked for, a group for a slot or a turn of an episode, and which of the completions it answers with can be used.
Pure.

Invariant: a group that is let through has at least two completions, all with tokens: one alone has no baseline.
"""

import asyncio

import msgspec
import numpy as np

from learner.config import LearnerRun, SamplingConfig
from learner.environments.episode import REWARDED, AnyGroup, PlayedGroup
from learner.environments.player import Asked
from learner.prompts.prompts import Prompt
from learner.rollouts.ledger_row import group_id_of
from protocol.errors import ProtocolError
from protocol.messages import Generate, Group, GroupFailed, Sampling

MIN_SURVIVORS = 2
RETRY_STRIDE = 1_327_217_885
"""2**31 divided by the golden ratio: few attempts of slots less than a million apart never share a seed."""


class Owed(msgspec.Struct, kw_only=True, eq=False):
    """What a server owes us, or is to."""

    sent_at: float | None = None
    """When it was last handed to a connection."""
    owed_by: str | None = None
    """The endpoint of the server that was asked last and may still answer."""
    answered_by: str = ""
    """Likewise, of the one whose group has come."""

    @property
    def group_id(self) -> str:
        raise NotImplementedError

    @property
    def stays_at(self) -> str:
        """The endpoint of the server that has its keys and values."""
        return ""

    def message(self, run: LearnerRun) -> Generate:
        """As the server gets it."""
        raise NotImplementedError


class Request(Owed, kw_only=True, eq=False):
    """The group of a slot."""

    slot: int
    attempt: int
    prompt: Prompt

    @property
    def group_id(self) -> str:
        return group_id_of(self.slot, self.attempt)

    def message(self, run: LearnerRun) -> Generate:
        sampling = run.learner.sampling
        return Generate(
            group_id=self.group_id,
            prompt_token_ids=np.array(self.prompt.token_ids, np.int32),
            sampling=_sampling(
                sampling, sampling.num_completions, sampling.max_tokens, seed_of(run, self.slot, self.attempt)
            ),
            deadline_s=run.learner.group_deadline_s,
        )


class TurnRequest(Owed, kw_only=True, eq=False):
    """A turn of an episode of a slot's group."""

    name: str
    """Of no other turn of any life of this run: a server may still have what it was asked for before a restart."""
    slot: int
    attempt: int
    """Of its group and of this turn together: 0 only for the first of both."""
    turn: Asked
    answer: "asyncio.Future[Group | GroupFailed]"

    @property
    def group_id(self) -> str:
        return self.name

    @property
    def stays_at(self) -> str:
        return self.turn.stays_at

    def message(self, run: LearnerRun) -> Generate:
        seed = seed_of(run, self.slot, self.attempt, self.turn)
        return Generate(
            group_id=self.group_id,
            prompt_token_ids=self.turn.token_ids,
            sampling=_sampling(run.learner.sampling, 1, self.turn.max_tokens, seed, self.turn.stop),
            deadline_s=run.learner.group_deadline_s,
            salt=self.turn.salt,
        )


def seed_of(run: LearnerRun, slot: int, attempt: int, turn: Asked | None = None) -> int | None:
    """Return the seed of the first completion of a slot's group, or of a turn of it; None: the server draws one.

    A retry has another: the same tokens would fail in the same way. Seeds of retries lie in the upper half of 32 bits,
    which no first attempt uses. Higher bits would not help: torch's generator on CPUs ignores them.
    """
    config = run.learner.sampling
    if not config.seeded:
        return None
    seed = run.seed * 1_000_003 + slot * config.num_completions
    if turn is not None:
        seed = (seed + turn.episode) * run.learner.environment.max_turns + turn.number
    return seed % 2**31 if attempt == 0 else (seed + attempt * RETRY_STRIDE) % 2**31 + 2**31


def _sampling(
    config: SamplingConfig, num_completions: int, max_tokens: int, seed: int | None, stop: tuple[str, ...] = ()
) -> Sampling:
    return Sampling(
        num_completions=num_completions,
        max_tokens=max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=seed,
        stop=(*config.stop, *stop),
    )


def survivors(group: AnyGroup, config: SamplingConfig, vocab_size: int) -> AnyGroup | None:
    """Leave completions without tokens out; None if fewer than two are left that say anything about the policy.

    Raises ProtocolError for what was not asked for.
    """
    if isinstance(group, PlayedGroup):  # whose turns were checked one by one
        num_rewarded = sum(episode.course.state in REWARDED for episode in group.episodes)
        return group if num_rewarded >= MIN_SURVIVORS else None
    check_completions(group, config.num_completions, config.max_tokens, vocab_size)
    usable = [completion for completion in group.completions if len(completion.token_ids)]
    return msgspec.structs.replace(group, completions=usable) if len(usable) >= MIN_SURVIVORS else None


def check_completions(group: Group, num_completions: int, max_tokens: int, vocab_size: int) -> None:
    """Raise ProtocolError for what was not asked for: too many completions, or too long ones, or ids that are no tokens."""
    if len(group.completions) > num_completions:
        raise ProtocolError(
            f"group {group.group_id} has {len(group.completions)} completions, asked for were {num_completions}"
        )
    for completion in group.completions:
        ids = completion.token_ids
        if len(ids) > max_tokens:
            raise ProtocolError(
                f"group {group.group_id} has a completion of {len(ids)} tokens, asked for were at most {max_tokens}"
            )
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ProtocolError(
                f"group {group.group_id} has token ids from {ids.min()} to {ids.max()}, the model 0 to {vocab_size - 1}"
            )
