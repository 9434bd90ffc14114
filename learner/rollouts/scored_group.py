"""A group with its rewards, ready to be trained on: what the rollouts hand out, made of what has come or of what the ledger keeps.

Suffix: _G over the completions of the group.
"""

from typing import Any

import msgspec
import numpy as np

from learner.prompts.prompts import Prompt
from learner.rewards.workers import GroupRewards
from learner.rollouts.ledger import Ledger
from learner.rollouts.ledger_row import Row
from protocol.codec import unpack
from protocol.messages import Completion, Group, Part

UNKNOWN_VERSION = -1
"""Of groups from before a restart: a version that is trained again may have other weights under the same number."""


class ScoredGroup(Part):
    """One group ready to be trained on. `rewards_G[i] is None` when completion i is unscorable."""

    group_id: str
    slot: int
    prompt_token_ids: np.ndarray
    completions: list[Completion]
    rewards_G: list[float | None]
    rewards_by_function: dict[str, list[float | None]]
    entered_version: int
    """The policy version when the group entered the engine; UNKNOWN_VERSION if a restart lies between."""
    server: str = ""
    """The endpoint of the server that sent it; nobody knows after a restart."""
    logged_metrics: dict[str, list[float]] = msgspec.field(default_factory=dict)
    """What reward functions logged of it, by name."""
    logged_extra: dict[str, list[Any]] = msgspec.field(default_factory=dict)
    """The same per completion; a restart loses it."""

    @property
    def oldest_version(self) -> int:
        return min(completion.oldest_version for completion in self.completions)

    @property
    def newest_version(self) -> int:
        return max(version for completion in self.completions for version, _ in completion.versions)

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)


def received(ledger: Ledger, row: Row) -> Group:
    """Return a group that was received before a restart."""
    group = unpack(ledger.payload(row.group_id), Group)
    return msgspec.structs.replace(group, entered_version=UNKNOWN_VERSION)


def recalled(ledger: Ledger, row: Row, prompt: Prompt) -> ScoredGroup:
    """Return a group that was scored before a restart."""
    return scored_group(row.slot, prompt, received(ledger, row), rewards_of(row))


def rewards_of(row: Row) -> GroupRewards:
    """Return what the ledger keeps of a scored group's rewards."""
    assert row.rewards is not None
    return msgspec.json.decode(row.rewards, type=GroupRewards)


def scored_group(slot: int, prompt: Prompt, group: Group, rewards: GroupRewards, server: str = "") -> ScoredGroup:
    """Put a group, its prompt and its rewards together."""
    return ScoredGroup(
        group_id=group.group_id,
        slot=slot,
        prompt_token_ids=np.array(prompt.token_ids, np.int32),
        completions=group.completions,
        rewards_G=rewards.rewards,
        rewards_by_function=rewards.by_function,
        entered_version=group.entered_version,
        server=server,
        logged_metrics=rewards.logged_metrics,
        logged_extra=rewards.logged_extra,
    )
