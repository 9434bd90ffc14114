"""Which groups have signal: told by the rewards for answers, not by the penalty for lengths."""

from pathlib import Path
from typing import Any

import pytest

from learner.rewards.workers import FunctionRewards, GroupRewards
from learner.rollouts.rollout_group import RolloutGroup
from learner.rollouts.selection import Selection
from tests.learner.runs import make_run
from tests.learner.training.batch_rows import make_group


def accepted(tmp_path: Path, rewards: dict[str, list[float]], **learner: Any) -> bool:
    """Whether a group with these rewards is ready, and not replaced, in a run with active sampling and an overlong penalty."""
    reward = {"functions": ["exact_match", "share_right"], "overlong_buffer_tokens": 2}
    run = make_run(tmp_path, "tcp://127.0.0.1:1", dynamic_sampling=True, reward=reward, **learner)
    config = run.learner
    totals = [sum(values) for values in zip(*rewards.values(), strict=True)]
    scored = GroupRewards(
        rewards=totals, functions=[FunctionRewards(name=name, rewards=values) for name, values in rewards.items()]
    )
    group = make_group()
    ready = RolloutGroup(
        group_id="0.0", slot=0, prompt_token_ids=group.prompt_token_ids, completions=group.completions,
        rewards_G=scored.rewards, rewards_by_function=scored.by_function, entered_version=0,
    )  # fmt: skip
    return Selection(config).accepts(ready, num_replaced=0)


@pytest.mark.parametrize(
    ("exact", "share", "overlong", "expected"),
    [
        ([1.0, 1.0], [0.7, 0.7], [0.0, -0.3], False),  # all alike but for their lengths
        ([1.0, 0.0], [0.7, 0.7], [0.0, 0.0], True),
        ([0.0, 0.0], [0.7, 0.1], [0.0, 0.0], True),
        ([1.0, 0.0], [0.0, 1.0], [0.0, 0.0], False),  # the sums are alike
    ],
)
def test_a_group_has_signal_by_the_sum_of_its_rewards_without_the_overlong_penalty(
    tmp_path: Path, exact: list[float], share: list[float], overlong: list[float], expected: bool
) -> None:
    rewards = {"exact_match": exact, "share_right": share, "overlong": overlong}
    assert accepted(tmp_path, rewards) == expected


def test_one_function_may_decide_alone(tmp_path: Path) -> None:
    rewards = {"exact_match": [1.0, 1.0], "share_right": [0.7, 0.1], "overlong": [0.0, 0.0]}
    assert accepted(tmp_path, rewards)
    assert not accepted(tmp_path, rewards, signal_reward="exact_match")
    assert accepted(tmp_path, rewards, signal_reward="share_right")
