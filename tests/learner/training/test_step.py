"""A whole step against a plain one: completion by completion, unpadded, in float64, each case written out from its paper."""

import copy
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from learner.environments.episode import TokenSequence
from learner.rollouts.rollout_group import RolloutGroup
from learner.run_inputs import RunInputs
from learner.training.metrics import StepTimer, group_metrics
from learner.training.policy_trainer import make_trainer
from learner.training.step import train_on
from tests.learner.policy.plain import plain_logits
from tests.learner.ranks import on_two_ranks
from tests.learner.training.fixed_groups import MAX_TOKENS, VERSION, make_groups, make_moved_trainer, make_run
from tests.learner.training.gradients import CONFIGS, all_gradients, gradient_of, write_gradients

LEARNING_RATE = 0.1


Told = tuple[torch.Tensor, torch.Tensor]


def tell(model: torch.nn.Module, group: RolloutGroup, completion: TokenSequence) -> Told:
    """Logprob and entropy of each token of a completion, alone and unpadded."""
    prompt = group.prompt_token_ids.tolist()
    tokens = torch.tensor(prompt + completion.token_ids.tolist())
    logprobs_TV = plain_logits(model, tokens[None])[0, len(prompt) - 1 : -1].log_softmax(-1)
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV.gather(1, tokens[len(prompt) :, None])[:, 0], entropy_T


def group_advantages(rewards: list[float]) -> list[float]:
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (deviation + 1e-4) for reward in rewards]


def clipped(ratio_T: torch.Tensor, advantage: float) -> torch.Tensor:
    objective_T = torch.minimum(ratio_T * advantage, ratio_T.clamp(0.8, 1.28) * advantage)
    return -(objective_T.clamp(min=3 * advantage) if advantage < 0 else objective_T)


def behaviour(completion: TokenSequence) -> torch.Tensor:
    return torch.from_numpy(completion.behaviour_logprobs).double()


def plain_updates(
    model: torch.nn.Module,
    groups: list[RolloutGroup],
    advantages: list[list[float]],
    num_updates: int,
    loss_of: Callable,
) -> None:
    """`loss_of(i, told, completion, advantage)` gives a completion's loss per token; the mean is over all tokens."""
    num_tokens = sum(len(completion.token_ids) for group in groups for completion in group.completions)
    for _ in range(num_updates):
        model.zero_grad()
        total, i = 0.0, 0
        for group, advantages_G in zip(groups, advantages, strict=True):
            for completion, advantage in zip(group.completions, advantages_G, strict=True):
                total = total + loss_of(i, tell(model, group, completion), completion, advantage).sum() / num_tokens
                i += 1
        total.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LEARNING_RATE * parameter.grad


def compare(
    accelerator: Accelerator, plain: Callable, *, change: Callable = lambda groups: groups, **settings: Any
) -> dict[str, float]:
    """Train on the same groups by `train_on` and by `plain(model, reference, groups)`; the weights must be equal."""
    run = make_run(**settings)
    trainer = make_moved_trainer(run, accelerator)
    groups = change(make_groups(trainer.policy))
    model = copy.deepcopy(trainer.policy).double()
    reference = copy.deepcopy(make_start(accelerator)).double().requires_grad_(False)
    metrics = train_on(trainer, groups, VERSION, StepTimer())
    before = copy.deepcopy(model)
    plain(model, reference, groups)
    moved = 0.0
    start = dict(before.named_parameters())
    for (name, trained), expected in zip(trainer.policy.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(trained.double(), expected, atol=2e-6, rtol=0, msg=name)
        moved = max(moved, float((expected - start[name]).detach().abs().max()))
    assert moved > 1e-3
    return metrics


def make_start(accelerator: Accelerator) -> torch.nn.Module:
    """The policy as it was when the reference was taken."""
    torch.manual_seed(0)
    return accelerator.unwrap_model(make_trainer(RunInputs(make_run()), accelerator, is_new=True).policy)


def test_several_updates_on_a_batch_clip_against_the_stored_logprobs(accelerator: Accelerator) -> None:
    def plain(model, reference, groups):
        def loss(i, told, completion, advantage):
            return clipped((told[0] - behaviour(completion)).exp(), advantage)

        plain_updates(model, groups, [group_advantages(group.rewards_G) for group in groups], 3, loss)

    # At version 5 of 10 steps half of the peak: all updates of a step have the learning rate of its version.
    falling = {"learning_rate": 2 * LEARNING_RATE, "schedule": "linear", "max_grad_norm": 1e9}
    metrics = compare(accelerator, plain, updates_per_batch=3, optimizer=falling)
    assert 0 < metrics["loss/clipped_frac"] < 1


def test_decoupled_ppo_holds_the_proximal_policy_over_the_updates(accelerator: Accelerator) -> None:
    def plain(model, reference, groups):
        completions = [(group, completion) for group in groups for completion in group.completions]
        with torch.no_grad():
            proximal = [tell(model, group, completion)[0] for group, completion in completions]

        def loss(i, told, completion, advantage):
            weight_T = (proximal[i] - behaviour(completion)).exp().clamp(max=1.3)
            return weight_T * clipped((told[0] - proximal[i]).exp(), advantage)

        plain_updates(model, groups, [group_advantages(group.rewards_G) for group in groups], 2, loss)

    correction = {"anchor": "proximal", "weight": "truncate", "max_weight": 1.3}
    metrics = compare(accelerator, plain, updates_per_batch=2, off_policy_correction=correction)
    assert metrics["correction/bounded_frac"] > 0 and metrics["loss/kept_frac"] == 1


def test_the_log_linear_proximal_policy_goes_by_each_tokens_version(accelerator: Accelerator) -> None:
    def plain(model, reference, groups):
        def loss(i, told, completion, advantage):
            ages = [VERSION - version for version, count in completion.versions for _ in range(count)]
            share_T = torch.tensor([age / (age + 1) for age in ages], dtype=torch.float64)
            proximal_T = (behaviour(completion) + share_T * (told[0] - behaviour(completion))).detach()
            weight_T = (proximal_T - behaviour(completion)).exp().clamp(max=2.0)
            return weight_T * clipped((told[0] - proximal_T).exp(), advantage)

        plain_updates(model, groups, [group_advantages(group.rewards_G) for group in groups], 1, loss)

    compare(
        accelerator, plain, off_policy_correction={"anchor": "proximal", "proximal": "log_linear", "weight": "truncate"}
    )


def test_tokens_beyond_a_staleness_are_left_out_and_stay_in_the_denominator(accelerator: Accelerator) -> None:
    def plain(model, reference, groups):
        def loss(i, told, completion, advantage):
            ages = [VERSION - version for version, count in completion.versions for _ in range(count)]
            kept_T = torch.tensor([float(age <= 2) for age in ages], dtype=torch.float64)
            return kept_T * clipped((told[0] - behaviour(completion)).exp(), advantage)

        plain_updates(model, groups, [group_advantages(group.rewards_G) for group in groups], 1, loss)

    metrics = compare(accelerator, plain, off_policy_correction={"max_token_staleness": 2})
    assert 0 < metrics["correction/stale_frac"] == pytest.approx(1 - metrics["loss/kept_frac"])


def test_truncated_completions_are_left_out_of_the_mean_and_stay_in_the_baseline(accelerator: Accelerator) -> None:
    def plain(model, reference, groups):
        lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
        share_kept = sum(length for length in lengths if length < MAX_TOKENS) / sum(lengths)
        assert 0 < share_kept < 1

        def loss(i, told, completion, advantage):
            is_kept = len(told[0]) < MAX_TOKENS
            return is_kept / share_kept * clipped((told[0] - behaviour(completion)).exp(), advantage)

        plain_updates(model, groups, [group_advantages(group.rewards_G) for group in groups], 1, loss)

    compare(accelerator, plain, loss={"mask_truncated": True})


def test_a_kl_in_the_reward_changes_the_advantages_and_nothing_else(accelerator: Accelerator) -> None:
    def plain(model, reference, groups):
        advantages = []
        with torch.no_grad():
            for group in groups:
                kls = [
                    float((tell(model, group, completion)[0] - tell(reference, group, completion)[0]).sum())
                    for completion in group.completions
                ]
                shaped = [r - 0.2 * k for r, k in zip(group.rewards_G, kls, strict=True)]
                advantages.append([reward - statistics.mean(shaped) for reward in shaped])

        def loss(i, told, completion, advantage):
            return clipped((told[0] - behaviour(completion)).exp(), advantage)

        plain_updates(model, groups, advantages, 1, loss)

    kl = {"coef": 0.2, "place": "reward", "estimator": "k1"}
    metrics = compare(accelerator, plain, kl=kl, reference={"kind": "fixed"}, advantage={"scale": "none"})
    assert abs(metrics["reference/kl"]) > 1e-3


def test_a_kl_in_the_loss_is_measured_against_one_reference_over_all_updates(accelerator: Accelerator) -> None:
    def plain(model, reference, groups):
        completions = [(group, completion) for group in groups for completion in group.completions]

        def loss(i, told, completion, advantage):
            d_T = tell(reference, *completions[i])[0] - told[0]
            ratio_T = (told[0] - behaviour(completion)).exp()
            return clipped(ratio_T, advantage) + 0.5 * ratio_T * (d_T.exp() - d_T - 1)

        plain_updates(model, groups, [group_advantages(group.rewards_G) for group in groups], 2, loss)

    kl = {"coef": 0.5, "importance_weighted": True}
    compare(accelerator, plain, kl=kl, reference={"kind": "fixed"}, updates_per_batch=2)


def test_groups_without_signal_still_have_a_kl_and_an_entropy(accelerator: Accelerator) -> None:
    """Else both would weigh less and less while more and more prompts are solved."""

    def without_signal(groups: list[RolloutGroup]) -> list[RolloutGroup]:
        return [msgspec.structs.replace(group, rewards_G=[1.0] * len(group.completions)) for group in groups]

    def plain(model, reference, groups):
        completions = [(group, completion) for group in groups for completion in group.completions]

        def loss(i, told, completion, advantage):
            d_T = tell(reference, *completions[i])[0] - told[0]
            return 0.5 * (d_T.exp() - d_T - 1) - 0.3 * told[1]

        plain_updates(model, groups, [[0.0] * len(group.completions) for group in groups], 1, loss)

    settings = {"kl": {"coef": 0.5}, "reference": {"kind": "fixed"}, "loss": {"entropy_coef": 0.3}}
    metrics = compare(accelerator, plain, change=without_signal, **settings)
    assert metrics["batch/no_signal_groups"] == 3 and metrics["reference/kl"] > 1e-3


def test_a_logprob_that_is_no_number_takes_its_token_out_of_loss_and_metrics(accelerator: Accelerator) -> None:
    run = make_run(kl={"coef": 0.5}, reference={"kind": "fixed"})
    trainer = make_moved_trainer(run, accelerator)
    groups = [msgspec.structs.replace(group, entered_version=VERSION) for group in make_groups(trainer.policy)]
    for group in groups:
        for completion in group.completions:
            completion.behaviour_logprobs[0] = -math.inf
            completion.versions[:] = [(VERSION, len(completion.token_ids))]
    metrics = train_on(trainer, groups, VERSION, StepTimer())
    assert all(map(math.isfinite, metrics.values())) and "policy/mismatch_abs_logprob" in metrics
    assert group_metrics(groups, VERSION)["rollout/nonfinite_logprobs"] == 12


def test_an_entropy_bonus_raises_the_entropy_of_every_trained_token(accelerator: Accelerator) -> None:
    def plain(model, reference, groups):
        def loss(i, told, completion, advantage):
            return clipped((told[0] - behaviour(completion)).exp(), advantage) - 0.3 * told[1]

        plain_updates(model, groups, [group_advantages(group.rewards_G) for group in groups], 1, loss)

    compare(accelerator, plain, loss={"entropy_coef": 0.3})


def test_only_the_tokens_of_highest_entropy_of_the_whole_step_carry_the_objective(accelerator: Accelerator) -> None:
    def plain(model, reference, groups):
        completions = [(group, completion) for group in groups for completion in group.completions]
        with torch.no_grad():
            entropies = [tell(model, group, completion)[1] for group, completion in completions]
        in_order = sorted((float(entropy) for entropy_T in entropies for entropy in entropy_T), reverse=True)
        floor = in_order[round(0.2 * len(in_order)) - 1]

        def loss(i, told, completion, advantage):
            return (entropies[i] >= floor - 1e-7) * clipped((told[0] - behaviour(completion)).exp(), advantage)

        plain_updates(model, groups, [group_advantages(group.rewards_G) for group in groups], 1, loss)

    metrics = compare(accelerator, plain, loss={"top_entropy_frac": 0.2}, micro_batch_tokens=30)
    assert 0.18 < metrics["loss/kept_frac"] < 0.3  # first tokens of a group have the same entropy and stay together


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS.keys())
def test_micro_batches_padding_and_order_do_not_change_the_gradient(accelerator: Accelerator, settings: dict) -> None:
    run = make_run(**settings)
    trainer = make_moved_trainer(run, accelerator)
    groups = make_groups(trainer.policy)
    whole = gradient_of(trainer, groups)
    assert whole.abs().max() > 1e-3
    for budget in (1, 30):
        trainer.run = make_run(**settings, micro_batch_tokens=budget)
        torch.testing.assert_close(gradient_of(trainer, groups), whole, atol=1e-5, rtol=0)
    trainer.run = run
    turned = gradient_of(trainer, groups[::-1])
    torch.testing.assert_close(turned, whole, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one(accelerator: Accelerator, tmp_path: Path) -> None:
    one = all_gradients(accelerator, micro_batch_tokens=1000)
    on_two_ranks(write_gradients, tmp_path / "rank", 40)
    for rank in range(2):
        two = load_file(f"{tmp_path / 'rank'}-{rank}")
        for name, gradient in one.items():
            torch.testing.assert_close(two[name], gradient, atol=1e-5, rtol=0, msg=name)
