"""Which groups have signal: decided by the rewards of answers, not by the overlong penalty."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.environments.episode import EpisodeTurn
from learner.prompts.prompts import Prompt
from learner.rollouts.group_requests import GroupRequest
from learner.rollouts.selection import Selection
from protocol.messages import Group
from tests.learner.rollouts.scored_groups import RewardsByFunction, score
from tests.learner.runs import make_run


def accepted(tmp_path: Path, rewards: RewardsByFunction, **settings: Any) -> bool:
    """Return whether a group with these rewards is kept in a run with dynamic sampling and an overlong penalty."""
    reward = {"functions": ["exact_match", "share_right"], "overlong_buffer_tokens": 2}
    run = make_run(tmp_path, "tcp://127.0.0.1:1", dynamic_sampling=True, reward=reward, **settings)
    prompt = Prompt(prompt_id=0, prompt="1", token_ids=[1], columns={})
    request = GroupRequest(slot=0, attempt=0, prompt=prompt)
    scored = score(request, Group(group_id="0.0", entered_version=0, completions=[]), rewards)
    return Selection(run.learner).accepts(scored.group, num_replaced=0)


@pytest.mark.parametrize(
    ("exact", "share", "overlong", "expected"),
    [
        ([1.0, 1.0], [0.7, 0.7], [0.0, -0.3], False),  # equal except for the lengths
        ([1.0, 0.0], [0.7, 0.7], [0.0, 0.0], True),
        ([0.0, 0.0], [0.7, 0.1], [0.0, 0.0], True),
        ([1.0, 0.0], [0.0, 1.0], [0.0, 0.0], False),  # the sums are equal
    ],
)
def test_a_group_has_signal_by_the_sum_of_its_rewards_without_the_overlong_penalty(
    tmp_path: Path, exact: list[float], share: list[float], overlong: list[float], expected: bool
) -> None:
    rewards = {"exact_match": exact, "share_right": share, "overlong": overlong}
    assert accepted(tmp_path, rewards) == expected


def test_the_overlong_penalty_is_no_signal_for_an_advantage_function_either(tmp_path: Path) -> None:
    rewards = {"exact_match": [1.0, 1.0], "share_right": [0.7, 0.7], "overlong": [0.0, -0.3]}
    assert not accepted(tmp_path, rewards, advantage={"function": "mine.py:f"})


@pytest.mark.parametrize(("signal_reward", "expected"), [(None, True), ("exact_match", False), ("share_right", True)])
def test_a_single_function_can_decide_the_signal(tmp_path: Path, signal_reward: str | None, expected: bool) -> None:
    rewards = {"exact_match": [1.0, 1.0], "share_right": [0.7, 0.1], "overlong": [0.0, 0.0]}
    assert accepted(tmp_path, rewards, signal_reward=signal_reward) == expected


def test_a_batch_counts_its_groups_without_signal_also_without_dynamic_sampling(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tcp://127.0.0.1:1", reward={"functions": ["exact_match"]})
    request = GroupRequest(slot=0, attempt=0, prompt=Prompt(prompt_id=0, prompt="1", token_ids=[1], columns={}))
    empty = Group(group_id="0.0", entered_version=0, completions=[])
    groups = [score(request, empty, {"exact_match": rewards}).group for rewards in ([1.0, 1.0], [0.0, 0.0], [0.0, 1.0])]
    assert Selection(run.learner).metrics_of(groups, num_replaced=0)["batch/no_signal_groups"] == 2


@pytest.mark.parametrize(
    ("advantage", "turn_rewards", "signal_reward", "expected"),
    [
        ({"credit": "turn"}, [[0.75, 0.25], [0.25, 0.75]], None, True),
        ({"credit": "turn"}, [[0.75, 0.25], [0.75, 0.25]], None, False),
        ({"credit": "turn"}, [[None, None], [None]], None, False),
        ({"credit": "gigpo"}, [[None, None], [None]], None, True),  # it discounts the longer episode
        ({"credit": "episode"}, [[0.75, 0.25], [0.25, 0.75]], None, False),
        ({"credit": "turn"}, [[0.75, 0.25], [0.25, 0.75]], "environment_reward", False),
        ({"function": "mine.py:f"}, [[0.75, 0.25], [0.25, 0.75]], None, True),
        ({"function": "mine.py:f"}, [[0.75, 0.25], [0.75, 0.25]], None, False),
        ({"function": "mine.py:f"}, [[None, None], [None]], None, False),  # as for functions of whole episodes
        ({"function": "mine.py:f"}, [[1.0, 0.0], [1.0]], None, False),
        ({"function": "mine.py:f"}, [[0.75, 0.25], [0.25, 0.75]], "environment_reward", False),
    ],
)
def test_rewards_of_turns_are_a_signal_of_their_own(
    tmp_path: Path,
    advantage: dict[str, str],
    turn_rewards: list[list[float | None]],
    signal_reward: str | None,
    expected: bool,
) -> None:
    run = make_run(
        tmp_path, "tcp://127.0.0.1:1", dynamic_sampling=True, reward={"functions": ["environment_reward"]},
        environment={"factory": "guess"}, advantage=advantage, signal_reward=signal_reward,
    )  # fmt: skip
    request = GroupRequest(slot=0, attempt=0, prompt=Prompt(prompt_id=0, prompt="1", token_ids=[1], columns={}))
    empty = Group(group_id="0.0", entered_version=0, completions=[])
    turns_G = [[EpisodeTurn(reward=reward, state="s") for reward in rewards] for rewards in turn_rewards]
    group = msgspec.structs.replace(score(request, empty, {"environment_reward": [1.0, 1.0]}).group, turns_G=turns_G)
    assert Selection(run.learner).accepts(group, num_replaced=0) == expected
