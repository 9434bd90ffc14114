"""The soft overlong penalty against the paper's formula, and the way it joins the other rewards."""

from pathlib import Path

import numpy as np
import pytest

from learner.algorithm.advantages import combined_advantages
from learner.config import AdvantageConfig
from learner.environments.episode import TokenSequence
from learner.rewards.scoring import overlong_rewards, with_overlong
from learner.rewards.workers import FunctionRewards, GroupRewards, RewardConfig
from learner.train import train
from tests.learner.model_engine import tiny_server
from tests.learner.test_train import make_run, metrics_of, rows_of


def branch(num_tokens: int, finish_reason: str = "stop") -> TokenSequence:
    return TokenSequence(
        token_ids=np.ones(num_tokens, np.int32),
        behaviour_logprobs=np.zeros(num_tokens, np.float32),
        versions=[(0, num_tokens)],
        finish_reason=finish_reason,
    )


def test_the_penalty_is_that_of_the_paper_length_by_length() -> None:
    """Worked out by hand from arXiv 2503.14476 eq. 13 with L_max = 20 and L_cache = 4."""
    expected = {1: 0.0, 15: 0.0, 16: 0.0, 17: -0.25, 18: -0.5, 19: -0.75, 20: -1.0}
    assert overlong_rewards([branch(n) for n in expected], 20, 4, 1.0) == list(expected.values())
    assert overlong_rewards([branch(n) for n in expected], 20, 4, 0.5) == [value / 2 for value in expected.values()]


def test_a_truncated_completion_gets_the_whole_penalty_however_short_the_context_cut_it() -> None:
    assert overlong_rewards([branch(20, "length"), branch(3, "length")], 20, 4, 1.0) == [-1.0, -1.0]


def test_the_penalty_is_added_to_what_is_scorable_and_named_beside_the_functions() -> None:
    rewards = GroupRewards(rewards=[1.0, None, 0.0], functions=[FunctionRewards(name="f", rewards=[1.0, None, 0.0])])
    penalised = with_overlong(rewards, [-0.5, -1.0, 0.0])
    assert penalised.rewards == [0.5, None, 0.0]
    assert penalised.by_function == {"f": [1.0, None, 0.0], "overlong": [-0.5, None, 0.0]}
    assert penalised.mean == 0.25


def test_the_penalty_has_weight_one_where_rewards_are_normalised_one_by_one() -> None:
    config = RewardConfig(functions=("m:f", "m:g"), weights=(2.0, 0.0), overlong_buffer_tokens=4)
    assert config.weight_by_name == {"f": 2.0, "g": 0.0, "overlong": 1.0}
    rewards = {"f": [1.0, 1.0], "g": [0.0, 3.0], "overlong": [0.0, -1.0]}
    ((longer_is_worse, worse),) = combined_advantages(
        [[2.0, 1.0]], [rewards], config.weight_by_name, AdvantageConfig(combine="normalize_then_sum")
    )
    assert longer_is_worse > 0 > worse


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"overlong_buffer_tokens": 0}, "must be at least 1"),
        ({"overlong_buffer_tokens": 2, "overlong_penalty": 0.0}, "must be above 0"),
        ({"overlong_buffer_tokens": 2, "functions": ("m:overlong",)}, "rename the function"),
    ],
)
def test_a_penalty_that_makes_no_sense_is_refused(config: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RewardConfig(**{"functions": ("m:f",)} | config)


def test_a_run_logs_the_penalty_and_keeps_it_in_the_ledger(tmp_path: Path) -> None:
    with tiny_server() as server:
        reward = {"functions": ["share_right"], "overlong_buffer_tokens": 3, "overlong_penalty": 0.5}
        run = make_run(tmp_path, server.endpoint, steps=2, reward=reward, advantage={"combine": "normalize_then_sum"})
        train(run, resume=False)
    for line in metrics_of(run):
        assert -0.5 <= line["reward/overlong"] < 0
        assert line["reward/mean"] == pytest.approx(line["reward/share_right"] + line["reward/overlong"])
    assert all('"overlong"' in rewards for (rewards,) in rows_of(run, "rewards"))
