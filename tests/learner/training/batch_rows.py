"""Artificial completions, rows and groups, without a policy."""

import numpy as np

from learner.environments.episode import TokenSequence
from learner.rollouts.rollout_group import RolloutGroup
from learner.training.batch import BatchRow

Shapes = list[tuple[int, list[int]]]
"""Shapes of groups: the length of the prompt, and those of the completions."""


def make_completion(token_ids: list[int], versions: list[tuple[int, int]] | None = None) -> TokenSequence:
    return TokenSequence(
        token_ids=np.array(token_ids, np.int32),
        behavior_logprobs=-np.array(token_ids, np.float32) / 100,
        versions=versions or [(3, len(token_ids))],
        finish_reason="stop",
    )


def make_row(prompt: list[int], completion: TokenSequence, advantage: float, group: int = 0) -> BatchRow:
    return BatchRow(
        prompt_token_ids=np.array(prompt, np.int32),
        branch=completion,
        group=group,
        episode=0,
        advantage=advantage,
        weight=2 * advantage,
        entered_version=3,
    )


def rows_of(shapes: Shapes) -> list[BatchRow]:
    """Return rows that are identified by their unique advantages."""
    lengths = [(group, prompt, length) for group, (prompt, lengths) in enumerate(shapes) for length in lengths]
    return [
        make_row([group] * prompt, make_completion([1] * length), float(i), group)
        for i, (group, prompt, length) in enumerate(lengths)
    ]


def make_group(slot: int = 0) -> RolloutGroup:
    return RolloutGroup(
        group_id=f"{slot}.0",
        slot=slot,
        prompt_token_ids=np.array([1, 2], np.int32),
        completions=[make_completion([10 + g, 20 + g]) for g in range(2)],
        rewards_G=[0.0, 1.0],
        entered_version=3,
        rewards_by_function={},
    )
