"""A whole step compared with a plain implementation, for cases from papers, with completions and episodes."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from learner.environments.episode import EpisodeTurn, TokenSequence
from learner.forward import pack as forward_pack
from learner.rollouts.rollout_group import RolloutGroup
from learner.training import packing
from learner.training.distributed import StepBatch
from learner.training.metrics import StepTimer, group_metrics
from learner.training.step import advantages, train_on
from protocol.codec import pack, unpack
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.learner.training.fixed_groups import MAX_TOKENS, VERSION, make_groups, make_moved_trainer, make_run
from tests.learner.training.gradients import gradients
from tests.learner.training.plain_step import CASES, FIXED, Rule, episodes_of, k3, plain_step

ANSWER = [3, 9]
"""Tokens of the environment."""


def answered(branch: TokenSequence) -> TokenSequence:
    """Return two turns, with tokens of the environment after the first token."""
    versions = [(version, 1) for version, count in branch.versions for _ in range(count)]
    return TokenSequence(
        token_ids=np.insert(branch.token_ids, 1, ANSWER).astype(np.int32),
        behavior_logprobs=np.insert(branch.behavior_logprobs, 1, [0.0, 0.0]).astype(np.float32),
        versions=[*versions[:1], (None, len(ANSWER)), *versions[1:]],
        finish_reason=branch.finish_reason,
    )


def with_episodes(groups: list[RolloutGroup], first_token: int | None = 7) -> list[RolloutGroup]:
    """Return groups of episodes with two turns, of which every other episode has a second branch with its own prompt.

    That prompt starts differently from the group's unless `first_token` is None.
    """
    changed = []
    for group in groups:
        episodes = [[answered(branch)] for branch in group.completions]
        for number, branches in enumerate(episodes):
            if number % 2:
                first = group.prompt_token_ids[0] if first_token is None else first_token
                own_prompt = np.array([first, *group.prompt_token_ids[1:], 11, number], np.int32)
                branches.append(msgspec.structs.replace(group.completions[number - 1], prompt_token_ids=own_prompt))
        flat = [branch for branches in episodes for branch in branches]
        changed.append(msgspec.structs.replace(group, completions=flat, num_branches_G=list(map(len, episodes))))
    groups_of_other_ranks = unpack(pack(StepBatch(groups=changed)), StepBatch).groups
    assert groups_of_other_ranks is not None
    return groups_of_other_ranks


def with_turns(groups: list[RolloutGroup]) -> list[RolloutGroup]:
    """Return such episodes with rewards of their turns. The second branch is the last turn, and some turns are adjacent."""
    changed = []
    for group in with_episodes(groups):
        completions, turns_G = [], []
        for number, (first, *others) in enumerate(group.branches_G):
            rest = first.num_sampled - 1
            lengths = [1, 1, rest - 1] if number == 3 and rest > 1 else [1, rest] if rest else [1]
            completions.append(msgspec.structs.replace(first, turns=list(enumerate(lengths))))
            completions += [msgspec.structs.replace(one, turns=[(len(lengths), one.num_sampled)]) for one in others]
            rewards = [0.25 * number - 0.5, None, 0.125, -0.25][: len(lengths) + len(others)]
            turns_G.append([EpisodeTurn(reward=reward) for reward in rewards])
        by_function = {"environment_reward": group.rewards_G}
        changed.append(
            msgspec.structs.replace(group, completions=completions, turns_G=turns_G, rewards_by_function=by_function)
        )
    groups_of_other_ranks = unpack(pack(StepBatch(groups=changed)), StepBatch).groups
    assert groups_of_other_ranks is not None
    return groups_of_other_ranks


def compare(
    accelerator: Accelerator, rule: Rule, settings: dict[str, Any], change: Callable[[list], list]
) -> dict[str, float]:
    """Train on the same groups in both ways. Weights and extremes of tokens must be equal."""
    trainer = make_moved_trainer(make_run(**settings), accelerator)
    groups = change(make_groups(trainer.policy))
    model = copy.deepcopy(trainer.policy).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    reference = AutoModelForCausalLM.from_pretrained(resolve_model("tiny:digits"), dtype=torch.float64)
    metrics = train_on(trainer, groups, VERSION, StepTimer())
    extremes = plain_step(model, reference, groups, rule)
    assert metrics["policy/ratio_min"] == pytest.approx(extremes.ratio_min, rel=1e-4)
    assert metrics["policy/ratio_max"] == pytest.approx(extremes.ratio_max, rel=1e-4)
    assert metrics["loss/max_token_share"] == pytest.approx(extremes.max_token_share, rel=1e-3)
    # Logprobs of groups that entered under an older version are not compared: they may use its KV cache.
    assert not any("mismatch" in name for name in metrics)
    for (name, trained), expected in zip(trainer.policy.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained.double(), expected, atol=2e-6, rtol=0, msg=name)
    moved = zip(model.parameters(), before, strict=True)
    assert max(float((parameter - start).detach().abs().max()) for parameter, start in moved) > 1e-3
    return metrics


@pytest.mark.parametrize("change", [lambda groups: groups, with_episodes], ids=["completions", "episodes"])
@pytest.mark.parametrize(("settings", "rule"), CASES.values(), ids=CASES)
def test_a_step_equals_the_step_of_its_paper(
    accelerator: Accelerator, settings: dict[str, Any], rule: Rule, change: Callable[[list], list]
) -> None:
    metrics = compare(accelerator, rule, settings, change)
    assert 0 < metrics["loss/clipped_frac"] < 1
    correction = settings.get("off_policy_correction", {})
    if "max_weight" in correction:
        assert metrics["correction/bounded_frac"] > 0 and metrics["loss/kept_frac"] == 1
    if "max_token_staleness" in correction:
        assert 0 < metrics["correction/stale_frac"] == pytest.approx(1 - metrics["loss/kept_frac"])
    if "kl" in settings:
        assert abs(metrics["reference/kl"]) > 1e-3
    if rule.top_entropy < 1:
        assert (
            0.18 < metrics["loss/kept_frac"] < 0.3
        )  # first tokens of a group have equal entropies and are kept together


def test_a_step_with_credit_by_turn_trains_each_token_with_the_advantage_of_its_turn(accelerator: Accelerator) -> None:
    settings = {
        "advantage": {"credit": "turn", "scale": "none", "baseline": "leave_one_out"},
        "environment": {"agent": "none:none"},
        "reward": {"functions": ["environment_reward"], "weights": [2.0]},
    }
    compare(accelerator, Rule(is_by_turn=True), settings, with_turns)


def test_a_function_may_tell_turns_apart_unless_the_ratio_covers_the_completion(tmp_path: Path) -> None:
    function = tmp_path / "mine.py"
    function.write_text("def f(rewards):\n    return rewards.turn_rewards_P_G_K\n")
    branch = TokenSequence(
        token_ids=np.array([3, 0], np.int32), behavior_logprobs=np.zeros(2, np.float32), versions=[(0, 2)],
        finish_reason="stop", turns=[(0, 1), (1, 1)],
    )  # fmt: skip
    group = RolloutGroup(
        group_id="0.0", slot=0, prompt_token_ids=np.array([1], np.int32), completions=[branch], rewards_G=[1.0],
        rewards_by_function={"environment_reward": [1.0]}, entered_version=0,
        turns_G=[[EpisodeTurn(reward=0.25), EpisodeTurn(reward=0.75)]],
    )  # fmt: skip
    settings = {"environment": {"agent": "none:none"}, "reward": {"functions": ["environment_reward"]}}
    for objective in ("grpo", "kl_cov", "gspo", "vespo"):
        config = make_run(
            loss={"objective": objective}, advantage={"function": f"{function}:f"}, **settings
        ).learner  # fmt: skip
        if objective in ("grpo", "kl_cov"):
            assert advantages([group], config) == [[[0.25, 0.75]]]
            continue
        refusal = rf'advantage\.function = .*mine\.py:f. returned different .* learner\.loss\.objective = "{objective}"'
        with pytest.raises(ConfigError, match=refusal):
            advantages([group], config)
        single = msgspec.structs.replace(group, turns_G=[[EpisodeTurn(reward=1.0)]])
        assert advantages([single], config) == [[[1.0]]]


def test_groups_without_signal_still_have_a_kl_and_an_entropy(accelerator: Accelerator) -> None:
    """Otherwise the weight of both would fall while more prompts are solved."""

    def without_signal(groups: list[RolloutGroup]) -> list[RolloutGroup]:
        return [msgspec.structs.replace(group, rewards_G=[1.0] * len(group.completions)) for group in groups]

    settings = {"kl": {"coef": 0.5}, "loss": {"entropy_coef": 0.3}, **FIXED}
    rule = Rule(lambda branch: 0.5 * k3(branch) - 0.3 * branch.entropy)
    metrics = compare(accelerator, rule, settings, without_signal)
    assert metrics["reference/kl"] > 1e-3


def test_shared_prefixes_of_an_episode_are_computed_once_with_the_same_gradient(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (forward_pack, packing):
        monkeypatch.setattr(module, "MIN_SHARED", 1)
    compare(accelerator, Rule(), {}, lambda groups: with_episodes(groups, first_token=None))


def test_a_token_with_a_nan_logprob_is_excluded_from_loss_and_metrics(accelerator: Accelerator) -> None:
    run = make_run(kl={"coef": 0.5}, **FIXED)
    trainer = make_moved_trainer(run, accelerator)
    groups = [msgspec.structs.replace(group, entered_version=VERSION) for group in make_groups(trainer.policy)]
    for group in groups:
        for completion in group.completions:
            completion.behavior_logprobs[0] = -math.inf
            completion.versions[:] = [(VERSION, len(completion.token_ids))]
    metrics = train_on(trainer, groups, VERSION, StepTimer())
    assert all(map(math.isfinite, metrics.values())) and "policy/mismatch_abs_logprob" in metrics
    assert group_metrics(groups, VERSION)["rollout/nonfinite_logprobs"] == 12


def test_micro_batches_padding_and_order_do_not_change_the_gradient(accelerator: Accelerator) -> None:
    whole = gradients(accelerator, micro_batch_tokens=1000)
    for micro_batch_tokens, is_turned in ((1, False), (30, False), (1000, True)):
        found = gradients(accelerator, micro_batch_tokens=micro_batch_tokens, is_turned=is_turned)
        for name, gradient in whole.items():
            assert gradient.abs().max() > 1e-3
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=0, msg=name)


def test_metrics_count_episodes_and_what_the_policy_sampled(accelerator: Accelerator) -> None:
    trainer = make_moved_trainer(make_run(), accelerator)
    (group,) = with_episodes(make_groups(trainer.policy, num_groups=1))
    sampled = [sum(c for b in branches for v, c in b.versions if v is not None) for branches in episodes_of(group)]
    metrics = group_metrics([group], VERSION)
    assert metrics["rollout/tokens"] == sum(sampled)
    assert metrics["rollout/completion_length_max"] == max(sampled)
    assert metrics["rollout/completion_length_mean"] == sum(sampled) / 4
    oldest = min(v for branch in group.completions for v, _ in branch.versions if v is not None)
    assert metrics["staleness/max"] == VERSION - oldest


@pytest.mark.parametrize(("settings", "trained"), [({}, 0.5), ({"kl": {"coef": 1e-6}} | FIXED, 1.0)])
def test_the_share_of_the_tokens_that_the_other_metrics_cover_is_measured(
    accelerator: Accelerator, settings: dict[str, Any], trained: float
) -> None:
    trainer = make_moved_trainer(make_run(**settings), accelerator)
    (group,) = make_groups(trainer.policy, num_groups=1)
    ones = [1.0] * len(group.rewards_G)
    solved = msgspec.structs.replace(group, slot=1, rewards_G=ones, rewards_by_function={"share_right": ones})
    assert train_on(trainer, [group, solved], VERSION, StepTimer())["batch/trained_frac"] == trained


def test_an_episode_can_sample_more_tokens_than_one_turn(accelerator: Accelerator) -> None:
    """Covers metrics by length, which are by quarters of the maximum length of a turn."""
    run = make_run(off_policy_correction={"weight": "mask", "max_weight": 1.5})
    trainer = make_moved_trainer(run, accelerator)
    groups = make_groups(trainer.policy, num_groups=1)
    (turn,) = [branch for branch in groups[0].completions if len(branch.token_ids) == MAX_TOKENS][:1]
    twice = TokenSequence(
        token_ids=np.tile(turn.token_ids, 2), behavior_logprobs=np.tile(turn.behavior_logprobs, 2),
        versions=turn.versions * 2, finish_reason="stop",
    )  # fmt: skip
    groups = [msgspec.structs.replace(groups[0], completions=[twice, *groups[0].completions[1:]])]
    assert train_on(trainer, groups, VERSION, StepTimer())["loss/kept_frac_length_q4"] > 0


def test_a_branch_with_parts_of_different_lengths_is_rejected() -> None:
    with pytest.raises(ValueError, match="2 token ids, 2 behavior logprobs and versions of 3 tokens"):
        TokenSequence(
            token_ids=np.zeros(2, np.int32), behavior_logprobs=np.zeros(2, np.float32), versions=[(None, 3)],
            finish_reason="stop"
        )  # fmt: skip
