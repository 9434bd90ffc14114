"""Objectives and advantages of users: they replace the built-in ones, and their results are checked."""

import math
import re
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.algorithm.advantages import StepRewards
from learner.algorithm.loss import LossInputs, policy_loss
from learner.algorithm.objectives import Tokens
from learner.algorithm.plug_in import advantages_of, check_plug_ins, digest_of_plug_ins, has_ratio, objective_of
from learner.config import AdvantageConfig, KlConfig, LearnerConfig, LearnerRun, LossConfig, OffPolicyCorrectionConfig
from learner.storage.run_dir import open_run_dir
from protocol.config import load_config
from protocol.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs/custom-losses.md"
REWARDS = StepRewards(
    [[1.0, 0.0, None, 3.0], [None, None]],
    [{"f": [1.0, 0.0, None, 3.0]}, {"f": [None, None]}],
    {"f": 1.0},
    turn_rewards_P_G_K=[[[0.5, 0.5], [0.0], [0.0], [1.0, 1.0, 1.0]], [[0.0], [0.0]]],
    states_P_G_K=[[["a", "b"], ["a"], ["a"], ["a", "b", None]], [["a"], ["a"]]],
)
LOG_RATIO_BT = torch.tensor([[0.5, -0.1, 0.2], [-0.7, 0.0, 0.1]])
TOKENS = Tokens(
    LOG_RATIO_BT, LOG_RATIO_BT - 1, torch.tensor([[2.0] * 3, [-1.0] * 3]), torch.ones(2, 3, dtype=torch.bool)
)


def run_of(tmp_path: Path, *flags: str) -> LearnerRun:
    return load_config(
        LearnerRun, ["deploy/recipes/reverse.toml", "--run-dir", str(tmp_path / "run"), *flags], "learner train"
    )


def config_of(tmp_path: Path, *flags: str) -> LearnerConfig:
    return run_of(tmp_path, *flags).learner


def spec(tmp_path: Path, body: str, name: str = "f") -> str:
    path = tmp_path / "mine.py"
    path.write_text(body)
    return f"{path}:{name}"


def of_the_page(tmp_path: Path, name: str) -> str:
    """Return the spec of a function of the page, whose examples are one file."""
    return spec(
        tmp_path, "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)), name
    )


def loss_of(objective: str, correction: OffPolicyCorrectionConfig, **bounds: Any) -> tuple[float, dict, torch.Tensor]:
    """Return loss, sums and the gradient of the logprobs of two completions."""
    logprobs_BT = (LOG_RATIO_BT - 1).requires_grad_()
    inputs = LossInputs(
        logprobs_BT=logprobs_BT, behavior_logprobs_BT=torch.full((2, 3), -1.0), staleness_BT=torch.zeros(2, 3),
        advantages_BT=torch.tensor([[2.0] * 3, [-1.0] * 3]), weights_B=torch.full((2,), 0.25), mask_BT=torch.ones(2, 3),
    )  # fmt: skip
    loss, sums = policy_loss(inputs, LossConfig(objective=objective, **bounds), correction, KlConfig(), 0.0, 0.0)
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    return loss.item(), sums, gradient_BT


def test_the_objective_of_the_docs_page_defines_the_loss(tmp_path: Path) -> None:
    objective = of_the_page(tmp_path, "bounded_ratio")
    loss, sums, gradient_BT = loss_of(objective, OffPolicyCorrectionConfig(), clip_high=0.3)
    r = [[math.exp(value) for value in row] for row in LOG_RATIO_BT.tolist()]
    by_hand = -0.25 * (2 * (1.3 + r[0][1] + r[0][2]) - (0.7 + r[1][1] + r[1][2]))
    assert loss == pytest.approx(by_hand) and sums["clipped"] == 2
    expected = torch.tensor([[0.0, -0.5 * r[0][1], -0.5 * r[0][2]], [0.0, 0.25 * r[1][1], 0.25 * r[1][2]]])
    assert torch.allclose(gradient_BT, expected)


@pytest.mark.parametrize("width", [None, 0.15])
def test_the_worked_objective_of_the_docs_page_equals_the_built_in_one(tmp_path: Path, width: float | None) -> None:
    worked = of_the_page(tmp_path, "gmpo")
    parameters, bounds = ({}, {}) if width is None else ({"width": width}, {"clip_low": width, "clip_high": width})
    loss, sums, gradient_BT = loss_of(worked, OffPolicyCorrectionConfig(), parameters=parameters)
    expected, expected_sums, expected_BT = loss_of("gmpo", OffPolicyCorrectionConfig(), dual_clip=math.inf, **bounds)
    assert loss == expected and sums == expected_sums and torch.equal(gradient_BT, expected_BT)
    assert sums["clipped"] == (2 if width is None else 3)


def test_a_parameter_that_the_objective_does_not_declare_is_rejected(tmp_path: Path) -> None:
    config = LossConfig(objective=of_the_page(tmp_path, "gmpo"), parameters={"widht": 0.1})
    with pytest.raises(
        ConfigError, match=r"parameters contains widht, which .*:gmpo does not declare; .* width\. Correct"
    ):
        objective_of(config.objective)(TOKENS, config)


def test_an_objective_without_a_ratio_receives_the_importance_weight(tmp_path: Path) -> None:
    body = "def f(tokens, config): return -tokens.advantages_BT * tokens.logprobs_BT, tokens.mask_BT & False\n"
    correction = OffPolicyCorrectionConfig(weight="mask", max_weight=2.0)
    mine, built_in = (
        loss_of(one, correction)[2] for one in (spec(tmp_path, body + "f.has_ratio = False"), "reinforce")
    )
    assert torch.equal(mine, built_in) and len(set(mine.flatten().tolist())) == 6


def test_the_advantages_of_the_docs_page_use_the_median(tmp_path: Path) -> None:
    by_turn = [[[0.0, 0.0], [-1.0], [0.0], [2.0, 2.0, 2.0]], [[0.0], [0.0]]]
    assert advantages_of(of_the_page(tmp_path, "above_median"), REWARDS) == by_turn


def test_the_advantages_of_turns_of_the_docs_page_are_their_returns_to_go(tmp_path: Path) -> None:
    by_turn = [[[1.0, 0.5], [0.0], [0.0], [3.0, 2.0, 1.0]], [[0.0], [0.0]]]
    assert advantages_of(of_the_page(tmp_path, "returns_to_go"), REWARDS) == by_turn


@pytest.mark.parametrize("row", ["list(row)", "np.array(row)", "torch.tensor(row)"])
def test_an_advantage_function_sees_turns_and_may_return_an_advantage_for_each(tmp_path: Path, row: str) -> None:
    returned = f"[[{row} for row in G] for G in rewards.turn_rewards_P_G_K]"
    body = f"import numpy as np, torch\ndef f(rewards): return {returned}\n"
    body += "def g(rewards): return [[[float(s == 'b') for s in K] for K in G] for G in rewards.states_P_G_K]"
    assert advantages_of(spec(tmp_path, body), REWARDS) == REWARDS.turn_rewards_P_G_K
    of_states = [[[0.0, 1.0], [0.0], [0.0], [0.0, 1.0, 0.0]], [[0.0], [0.0]]]
    assert advantages_of(spec(tmp_path, body, "g"), REWARDS) == of_states


def test_a_function_that_modifies_its_arguments_affects_nothing_else(tmp_path: Path) -> None:
    body = (
        "def f(rewards):\n    [row.remove(None) for row in rewards.rewards_P_G if None in row]\n    return [[1.0] "
        "* len(row) for row in rewards.rewards_P_G]"
    )
    rewards = StepRewards(
        [[1.0, None, 0.0]], [{"f": [1.0, None, 0.0]}], {"f": 1.0}, [[[1.0], [0.0], [0.0]]], [[["a"], ["a"], ["a"]]]
    )
    with pytest.raises(ConfigError, match=r"for group 0 \[1\.0, 1\.0\]; expected"):
        advantages_of(spec(tmp_path, body), rewards)
    assert rewards.rewards_P_G == [[1.0, None, 0.0]]


def test_an_objective_that_modifies_its_tokens_in_place_affects_nothing_else(tmp_path: Path) -> None:
    body = """
def f(tokens, config):
    loss_BT = -tokens.log_ratio_BT.exp() * tokens.advantages_BT
    for tensor in (tokens.log_ratio_BT, tokens.logprobs_BT, tokens.advantages_BT, tokens.mask_BT):
        tensor.detach().zero_()
    return loss_BT, tokens.mask_BT
"""
    logprobs_BT = (LOG_RATIO_BT - 1).requires_grad_()
    tokens = Tokens(logprobs_BT + 1, logprobs_BT, TOKENS.advantages_BT.clone(), TOKENS.mask_BT.clone())
    loss_BT, _ = objective_of(spec(tmp_path, body))(tokens, LossConfig())
    assert logprobs_BT.requires_grad and loss_BT.requires_grad
    assert all(torch.equal(getattr(tokens, name), getattr(TOKENS, name)) for name in ("advantages_BT", "mask_BT"))
    assert torch.equal(tokens.logprobs_BT, LOG_RATIO_BT - 1)
    assert torch.allclose(tokens.log_ratio_BT, LOG_RATIO_BT)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("def f(tokens, config): return tokens.log_ratio_BT",
            r"returned a tensor of shape \(2, 3\); expected \(loss_BT, held_BT\)"),
        ("def f(tokens, config): return tokens.log_ratio_BT.sum(), tokens.mask_BT",
            r"returned \(a tensor of shape \(\), a tensor of"),
        ("def f(tokens, config): return None", "returned None; expected"),
        ("def f(tokens, config): return tokens.log_ratio_BT.detach(), tokens.mask_BT",
            "shape \\(2, 3\\) without a gradient, a tensor"),
        ("def f(tokens, config): return config.value('clip_low')",
            r"reads clip_low, which has no default for a user function; set learner\.loss\.clip_low"),
        ("def f(tokens, config): return config.value('width')",
            r"reads width, which has no default for a user function; declare it in the function's `parameters`"),
    ],
)  # fmt: skip
def test_an_objective_with_an_invalid_result_is_rejected(tmp_path: Path, body: str, problem: str) -> None:
    mine = spec(tmp_path, body)
    with pytest.raises(ConfigError, match=problem):
        check_plug_ins(config_of(tmp_path, "--learner.loss.objective", mine))


@pytest.mark.parametrize(
    ("weight", "anchor", "has_ratio", "problem"),
    [
        ("truncate", "behavior", True, r"the ratio of .*:f already is the importance weight, .* has_ratio = False on"),
        ("truncate", "behavior", False, None),
        ("truncate", "proximal", True, None),
        ("truncate", "proximal", False, r'"proximal" with .*:f, whose gradient has no ratio .* anchor = "behavior"'),
        ("mask", "behavior", True, None),
    ],
)
def test_an_importance_weight_does_not_count_twice_or_stop_at_the_anchor(
    tmp_path: Path, weight: str, anchor: str, has_ratio: bool, problem: str | None
) -> None:
    body = "def f(tokens, config): return -tokens.log_ratio_BT.exp() * tokens.advantages_BT, tokens.mask_BT & False\n"
    flags = ["--learner.loss.objective", spec(tmp_path, f"{body}f.has_ratio = {has_ratio}")]
    flags += ["--learner.off-policy-correction.weight", weight, "--learner.off-policy-correction.anchor", anchor]
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        check_plug_ins(config_of(tmp_path, *flags))


def test_a_function_that_raises_is_reported_with_file_and_line(tmp_path: Path) -> None:
    mine = spec(tmp_path, "def f(rewards):\n    return rewards.nothing")
    with pytest.raises(
        ConfigError, match=r"function = .* failed on a small example: AttributeError: .*mine\.py:2\)\. Correct"
    ):
        check_plug_ins(config_of(tmp_path, "--learner.advantage.function", mine))


def test_a_run_with_both_starts_and_resumes(tmp_path: Path) -> None:
    flags = ("--learner.loss.objective", of_the_page(tmp_path, "bounded_ratio"), "--learner.loss.clip-high", "0.3")
    run = run_of(tmp_path, *flags, "--learner.advantage.function", of_the_page(tmp_path, "above_median"))
    check_plug_ins(run.learner)
    for resume in (False, True):
        with closing(open_run_dir(run, resume=resume)) as run_dir:
            run_dir.begin()


PARTIAL_AND_OBJECT = """
from functools import partial

import torch


def scaled(tokens, config, scale):
    loss_BT = -scale * config.parameters["width"] * tokens.advantages_BT * tokens.log_ratio_BT
    return loss_BT, torch.zeros_like(tokens.mask_BT)


scaled.parameters, scaled.has_ratio = {"width": 0.5}, False


class Advantages:
    def __call__(self, rewards):
        return [[reward or 0.0 for reward in rewards_G] for rewards_G in rewards.rewards_P_G]


doubled, advantages = partial(scaled, scale=2.0), Advantages()
"""


def test_a_partial_and_a_callable_object_are_functions_with_declarations_and_a_file(tmp_path: Path) -> None:
    objective, advantages = (
        spec(tmp_path, PARTIAL_AND_OBJECT, "doubled"),
        spec(tmp_path, PARTIAL_AND_OBJECT, "advantages"),
    )
    config = config_of(tmp_path, "--learner.loss.objective", objective, "--learner.advantage.function", advantages)
    check_plug_ins(config)
    loss_BT, _ = objective_of(objective)(TOKENS, LossConfig(objective=objective))
    assert torch.equal(loss_BT, -TOKENS.advantages_BT * TOKENS.log_ratio_BT) and not has_ratio(objective)
    before = digest_of_plug_ins(config)
    spec(tmp_path, f"{PARTIAL_AND_OBJECT}# edited")
    assert digest_of_plug_ins(config) != before


@pytest.mark.parametrize(
    "returned",
    [
        "None", "[[1.0, 2.0]]", "[[1.0, 0.0, float('nan'), 0.0], [0.0, 0.0]]", "rewards.rewards_P_G",
        "[[1.0, 0.0, float('inf'), 0.0], [0.0, 0.0]]", "[[[1.0], [0.0], [0.0], 1.0], [0.0, 0.0]]",
    ],
)  # fmt: skip
def test_advantages_with_another_shape_or_nan_are_rejected(tmp_path: Path, returned: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"returned (\d groups instead of 2|for group 0 \[.*\]); expected one list per group",
    ):
        advantages_of(spec(tmp_path, f"def f(rewards): return {returned}"), REWARDS)


@pytest.mark.parametrize("named", ["missing.py:f", "no_such_module:f"])
def test_a_function_that_cannot_be_loaded_is_an_error_with_its_key(named: str) -> None:
    with pytest.raises(ConfigError, match=rf"learner\.loss\.objective = '{named}': importing"):
        objective_of(named)
    with pytest.raises(ConfigError, match=rf"learner\.advantage\.function = '{named}': importing"):
        advantages_of(named, REWARDS)


def test_a_name_without_a_colon_is_not_a_user_function() -> None:
    with pytest.raises(ValueError, match="objective = 'ppo' is not a known objective; use grpo, gspo"):
        LossConfig(objective="ppo")
    with pytest.raises(ValueError, match=r"function = 'mine' is not path/to/file\.py:name"):
        AdvantageConfig(function="mine")
