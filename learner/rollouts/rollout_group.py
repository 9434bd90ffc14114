"""Groups with rewards, ready for training, built from arrived groups or restored from the ledger.

Suffixes: _P over groups, _G over the episodes of the group, _K over the turns of an episode. A plain completion is an
episode with one branch of one turn.
"""

from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import Any, cast

import msgspec
import numpy as np

from learner.algorithm.advantages import StepRewards
from learner.algorithm.credit import spread_over_turns
from learner.config import RewardConfig
from learner.config.rewards import OF_ENVIRONMENT
from learner.environments.episode import (
    UNKNOWN_VERSION,
    AnyGroup,
    EpisodeGroup,
    EpisodeStats,
    EpisodeTurn,
    TokenSequence,
    episodes_of,
    num_sampled,
)
from learner.prompts.prompts import Prompt
from learner.rewards.workers import GroupRewards
from learner.rollouts.ledger import Ledger
from learner.rollouts.ledger_storage import GroupPayload, Row
from protocol.codec import pack, unpack
from protocol.messages import Group, Part


class RolloutGroup(Part):
    """Group ready for training; None in `rewards_G` marks an unscorable episode."""

    group_id: str
    slot: int
    prompt_token_ids: np.ndarray
    completions: list[TokenSequence]
    """Branches of the first episode, then those of the second, and so on."""
    rewards_G: list[float | None]
    rewards_by_function: dict[str, list[float | None]]
    entered_version: int
    """Policy version when the group entered the engine. UNKNOWN_VERSION if it may date from before a restart."""
    server: str = ""
    """Endpoint of the server that sampled this group. Empty if unknown, as after a restart."""
    logged_metrics: dict[str, list[float]] = msgspec.field(default_factory=dict)
    """Values that reward functions logged, by name."""
    logged_extra: dict[str, list[Any]] = msgspec.field(default_factory=dict)
    """Values that reward functions logged per completion, by name. A restart loses them."""
    num_branches_G: list[int] = msgspec.field(default_factory=list)
    """Number of branches of each episode. Empty: one each."""
    stats_G: list[EpisodeStats] = msgspec.field(default_factory=list)
    """End state and statistics of each episode. Empty: there is no environment."""
    turns_G: list[list[EpisodeTurn]] = msgspec.field(default_factory=list)
    """Turns of each episode. Empty: one turn each."""
    prompt_experts: np.ndarray | None = None
    """Routed experts of the prompt, for branches that have none of their own."""

    def prompt_of(self, branch: TokenSequence) -> np.ndarray:
        return self.prompt_token_ids if branch.prompt_token_ids is None else branch.prompt_token_ids

    def prompt_experts_of(self, branch: TokenSequence) -> np.ndarray | None:
        return self.prompt_experts if branch.prompt_experts is None else branch.prompt_experts

    @property
    def branches_G(self) -> list[list[TokenSequence]]:
        """Branches of each episode."""
        branches = iter(self.completions)
        return [list(islice(branches, count)) for count in self.num_branches_G or [1] * len(self.completions)]

    @property
    def turns_G_K(self) -> list[list[EpisodeTurn]]:
        """Turns of each episode, at least one."""
        return [turns or [EpisodeTurn()] for turns in self.turns_G or [[] for _ in self.rewards_G]]

    @property
    def oldest_version(self) -> int:
        return min(version for branch in self.completions for version in branch.sampled_versions)

    @property
    def newest_version(self) -> int:
        return max(version for branch in self.completions for version in branch.sampled_versions)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(branch.num_sampled for branch in self.completions)


def step_rewards(groups: Sequence[RolloutGroup], config: RewardConfig) -> StepRewards:
    """Return the rewards of groups, divided over the turns of each episode."""
    return StepRewards(
        rewards_P_G=[group.rewards_G for group in groups],
        rewards_by_function_P=[group.rewards_by_function for group in groups],
        weights=config.weight_by_name,
        turn_rewards_P_G_K=[_turn_rewards(group, config) for group in groups],
        states_P_G_K=[[[turn.state for turn in turns] for turns in group.turns_G_K] for group in groups],
    )


def _turn_rewards(group: RolloutGroup, config: RewardConfig) -> list[list[float]]:
    """Return turn_rewards_G_K, in which the rewards of turns have the weight of `environment_reward`.

    They are part of that function's reward. Where it does not count, neither do they.
    """
    weight = config.weight_by_name.get(OF_ENVIRONMENT, 0.0)
    counts_G = group.rewards_by_function.get(OF_ENVIRONMENT, [None] * len(group.rewards_G))
    return [
        spread_over_turns(
            total, [None if own is None or turn.reward is None else weight * turn.reward for turn in turns]
        )
        for total, own, turns in zip(group.rewards_G, counts_G, group.turns_G_K, strict=True)
    ]


def texts_of(groups: Sequence[RolloutGroup], *, min_tokens: int, max_tokens: int) -> list[list[int]]:
    """Return prompts with completions, until they have `min_tokens` tokens in total.

    The first round takes one completion of each group, because completions of a group share their prompt. A
    text that is too long keeps its last `max_tokens` tokens.
    """
    texts: list[list[int]] = []
    for branches in zip_longest(*(group.completions for group in groups)):
        for group, branch in zip(groups, branches, strict=True):
            if branch is not None and sum(map(len, texts)) < min_tokens:
                texts.append([*group.prompt_of(branch).tolist(), *branch.token_ids.tolist()][-max_tokens:])
    return texts


def keep(ledger: Ledger, groups: list[AnyGroup]) -> None:
    """Store arrived groups in the ledger, in one commit."""
    ledger.receive(
        GroupPayload(group.group_id, pack(group), group.oldest_version, num_sampled(group)) for group in groups
    )


def received(ledger: Ledger, row: Row) -> AnyGroup:
    """Return a group that was received before a restart."""
    group = unpack(ledger.payload(row.group_id), cast(type[AnyGroup], AnyGroup))
    return msgspec.structs.replace(group, entered_version=UNKNOWN_VERSION)


def recalled(ledger: Ledger, row: Row, prompt: Prompt) -> RolloutGroup:
    """Return a group that was scored before a restart."""
    return scored_group(row.slot, prompt, received(ledger, row), rewards_of(row))


def rewards_of(row: Row) -> GroupRewards:
    """Return the rewards of a scored group from the ledger."""
    assert row.rewards is not None
    return msgspec.json.decode(row.rewards, type=GroupRewards)


def scored_group(slot: int, prompt: Prompt, group: AnyGroup, rewards: GroupRewards, server: str = "") -> RolloutGroup:
    """Combine a group with its prompt and rewards."""
    episodes = episodes_of(group)
    return RolloutGroup(
        group_id=group.group_id,
        slot=slot,
        prompt_token_ids=np.array(prompt.token_ids, np.int32),
        completions=[branch for episode in episodes for branch in episode.branches],
        rewards_G=rewards.rewards,
        rewards_by_function=rewards.by_function,
        entered_version=group.entered_version,
        server=server,
        logged_metrics=rewards.logged_metrics,
        logged_extra=rewards.logged_extra,
        num_branches_G=[len(episode.branches) for episode in episodes],
        stats_G=[episode.stats for episode in episodes] if isinstance(group, EpisodeGroup) else [],
        turns_G=[episode.turns for episode in episodes] if isinstance(group, EpisodeGroup) else [],
        prompt_experts=group.prompt_experts if isinstance(group, Group) else None,
    )
