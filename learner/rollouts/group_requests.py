"""Requests for groups and for turns of episodes, and checks of the completions that servers return.

Does no I/O. Invariant: a group that passes has at least two completions, all with tokens, because one
completion has no baseline.
"""

import asyncio

import msgspec
import numpy as np

from learner.config import LearnerRun, SamplingConfig
from learner.environments.episode import REWARDED, AnyGroup, EpisodeGroup
from learner.environments.player import TurnPrompt
from learner.prompts.prompts import Prompt
from learner.rollouts.ledger_storage import group_id_of
from protocol.errors import ProtocolError
from protocol.messages import Generate, Group, GroupFailed, RoutingShape, Sampling

MIN_SURVIVORS = 2
RETRY_STRIDE = 1_327_217_885
"""2**31 divided by the golden ratio. Few attempts of slots less than a million apart never share a seed."""


class PendingRequest(msgspec.Struct, kw_only=True, eq=False):
    """Base of the requests that a server has or will get."""

    sent_at: float | None = None
    """Time when the request was last handed to a connection, by the monotonic clock."""
    assigned_to: str | None = None
    """Endpoint of the server that has the request and may still answer."""
    answered_by: str = ""
    """Endpoint of the server that answered. Empty if unknown."""

    @property
    def group_id(self) -> str:
        raise NotImplementedError

    @property
    def stays_at(self) -> str:
        """Endpoint of the server with the episode's KV cache. Empty if there is none."""
        return ""

    def message(self, run: LearnerRun) -> Generate:
        """Return the request as a wire message."""
        raise NotImplementedError


class GroupRequest(PendingRequest, kw_only=True, eq=False):
    """Request for the group of a slot."""

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
                sampling, sampling.group_size, sampling.max_tokens, seed_of(run, self.slot, self.attempt)
            ),
            deadline_s=run.learner.group_idle_timeout_s,
            experts_from=0 if run.learner.routing_replay else None,
        )


class TurnRequest(PendingRequest, kw_only=True, eq=False):
    """Request for one turn of an episode in a slot's group."""

    name: str
    """Id that no other turn of this run has, also across restarts: a server may still have older requests."""
    slot: int
    attempt: int
    """Attempts of the group and of this turn combined. 0 only for the first attempt of both."""
    turn: TurnPrompt
    answer: "asyncio.Future[Group | GroupFailed]"

    @property
    def group_id(self) -> str:
        return self.name

    @property
    def stays_at(self) -> str:
        return self.turn.stays_at

    def message(self, run: LearnerRun) -> Generate:
        seed = seed_of(run, self.slot, self.attempt, self.turn)
        num_known = 0 if self.turn.experts is None else len(self.turn.experts)
        return Generate(
            group_id=self.group_id,
            prompt_token_ids=self.turn.token_ids,
            sampling=_sampling(run.learner.sampling, 1, self.turn.max_tokens, seed, self.turn.stop),
            deadline_s=run.learner.group_idle_timeout_s,
            salt=self.turn.salt,
            experts_from=num_known if run.learner.routing_replay else None,
        )


def seed_of(run: LearnerRun, slot: int, attempt: int, turn: TurnPrompt | None = None) -> int | None:
    """Return the seed of a group's first completion, or of a turn; None if unseeded.

    A retry gets another seed, because the same tokens would fail in the same way. Seeds of retries lie in the
    upper half of 32 bits, which first attempts never use. Higher bits would not help: torch's CPU generator
    ignores them.
    """
    config = run.learner.sampling
    if not config.seeded:
        return None
    seed = run.seed * 1_000_003 + slot * config.group_size
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
    """Remove completions without tokens; return None if fewer than two remain.

    Episodes that reveal nothing about the policy do not count.

    Raises:
        ProtocolError: The group is not what was requested.
    """
    if isinstance(group, EpisodeGroup):  # its turns were already checked
        num_rewarded = sum(episode.stats.state in REWARDED for episode in group.episodes)
        return group if num_rewarded >= MIN_SURVIVORS else None
    check_completions(group, config.group_size, config.max_tokens, vocab_size)
    usable = [completion for completion in group.completions if len(completion.token_ids)]
    return msgspec.structs.replace(group, completions=usable) if len(usable) >= MIN_SURVIVORS else None


def check_completions(group: Group, num_completions: int, max_tokens: int, vocab_size: int) -> None:
    """Check that the completions are within what was requested.

    Raises:
        ProtocolError: Too many completions, too many tokens, or ids outside the vocabulary.
    """
    if len(group.completions) > num_completions:
        raise ProtocolError(
            f"group {group.group_id} has {len(group.completions)} completions; expected at most {num_completions}"
        )
    for completion in group.completions:
        ids = completion.token_ids
        if len(ids) > max_tokens:
            raise ProtocolError(
                f"group {group.group_id} has a completion of {len(ids)} tokens; expected at most {max_tokens}"
            )
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ProtocolError(
                f"group {group.group_id} has token ids from {ids.min()} to {ids.max()}; expected ids of the model, "
                f"from 0 to {vocab_size - 1}"
            )


def check_routed_experts(group: Group, num_prompt: int, shape: RoutingShape) -> None:
    """Check that a group has the routed experts that were requested, of `num_prompt` prompt tokens.

    Raises:
        ProtocolError: Some are missing, of another shape, or no expert of the model.
    """
    found = [group.prompt_experts, *(completion.experts for completion in group.completions)]
    for experts in found:
        size = (shape.num_layers, shape.num_per_token)
        if experts is None or experts.shape[1:] != size or (experts.size and experts.max() >= shape.num_experts):
            what = "no routed experts" if experts is None else f"routed experts of shape {experts.shape}"
            raise ProtocolError(f"group {group.group_id} has {what} for some tokens; expected {shape}")
    if found[0] is None or len(found[0]) != num_prompt:
        raise ProtocolError(
            f"group {group.group_id} has the routed experts of {0 if found[0] is None else len(found[0])} prompt "
            f"tokens; expected {num_prompt}"
        )
