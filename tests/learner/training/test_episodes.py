"""Episodes in a step, against a plain one in float64 that takes what the policy did not sample out of every sum by hand."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from accelerate import Accelerator

from learner.environments.episode import TokenSequence
from learner.forward import pack as forward_pack
from learner.rollouts.rollout_group import RolloutGroup
from learner.training import packing
from learner.training.distributed import StepBatch
from learner.training.metrics import StepTimer, group_metrics
from learner.training.step import train_on
from protocol.codec import pack, unpack
from tests.learner.policy.plain import plain_logits
from tests.learner.training.fixed_groups import MAX_TOKENS, VERSION, make_groups, make_moved_trainer, make_run
from tests.learner.training.test_step import LEARNING_RATE, clipped, compare, group_advantages

ANSWER = [3, 9]
"""What an environment says."""


def answered(branch: TokenSequence) -> TokenSequence:
    """Two turns: the environment speaks after the first token."""
    versions = [(version, 1) for version, count in branch.versions for _ in range(count)]
    return TokenSequence(
        token_ids=np.insert(branch.token_ids, 1, ANSWER).astype(np.int32),
        behaviour_logprobs=np.insert(branch.behaviour_logprobs, 1, [0.0, 0.0]).astype(np.float32),
        versions=[*versions[:1], (None, len(ANSWER)), *versions[1:]],
        finish_reason=branch.finish_reason,
    )


def with_episodes(groups: list[RolloutGroup], first_token: int | None = 7) -> list[RolloutGroup]:
    """Every episode has two turns; every other one has a second branch, behind a prompt of its own, which begins otherwise than the
    group's unless `first_token` is None.
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
    return changed


class Told(msgspec.Struct):
    """What a model says of the tokens of a branch that a policy sampled, and what that policy said."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    behaviour: torch.Tensor


def tell(model: torch.nn.Module, group: RolloutGroup, branch: TokenSequence) -> Told:
    prompt = (group.prompt_token_ids if branch.prompt_token_ids is None else branch.prompt_token_ids).tolist()
    tokens = torch.tensor(prompt + branch.token_ids.tolist())
    logprobs_TV = plain_logits(model, tokens[None])[0, len(prompt) - 1 : -1].log_softmax(-1)
    owners = [version for version, count in branch.versions for _ in range(count)]
    sampled = [index for index, version in enumerate(owners) if version is not None]
    return Told(
        logprobs_TV.gather(1, tokens[len(prompt) :, None])[sampled, 0],
        -(logprobs_TV.exp() * logprobs_TV).sum(-1)[sampled],
        torch.from_numpy(branch.behaviour_logprobs).double()[sampled],
    )


def episodes_of(group: RolloutGroup) -> list[list[TokenSequence]]:
    starts = np.cumsum([0, *group.num_branches_G])
    return [group.completions[start:end] for start, end in pairwise(starts)]


def plain_update(
    model: torch.nn.Module,
    groups: list[RolloutGroup],
    advantages: list[list[float]],
    loss_of: Callable[[RolloutGroup, TokenSequence, Told, float], torch.Tensor],
    *,
    is_per_episode: bool = False,
) -> None:
    """`loss_of` gives the loss of each sampled token; the mean is over all of them, or over episodes of their means."""
    told = [[[tell(model, group, b) for b in branches] for branches in episodes_of(group)] for group in groups]
    lengths = [[sum(len(one.logprobs) for one in branches) for branches in episodes] for episodes in told]
    num_tokens, num_episodes = sum(map(sum, lengths)), sum(map(len, lengths))
    total: torch.Tensor | float = 0.0
    for g, group in enumerate(groups):
        for e, branches in enumerate(episodes_of(group)):
            divisor = num_episodes * lengths[g][e] if is_per_episode else num_tokens
            for branch, one in zip(branches, told[g][e], strict=True):
                total = total + loss_of(group, branch, one, advantages[g][e]).sum() / divisor
    model.zero_grad()
    total.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LEARNING_RATE * parameter.grad


def ppo(group: RolloutGroup, branch: TokenSequence, told: Told, advantage: float) -> torch.Tensor:
    return clipped((told.logprobs - told.behaviour).exp(), advantage)


def own_advantages(groups: list[RolloutGroup]) -> list[list[float]]:
    return [group_advantages(group.rewards_G) for group in groups]


@pytest.mark.parametrize("normalization", ["token", "sequence"])
@pytest.mark.parametrize("attention", ["packed", "sdpa"])
def test_what_the_policy_did_not_sample_is_in_no_loss_and_no_count(
    accelerator: Accelerator, normalization: str, attention: str
) -> None:
    def plain(model, reference, groups):
        is_per_episode = normalization == "sequence"
        plain_update(model, groups, own_advantages(groups), ppo, is_per_episode=is_per_episode)

    settings = {"loss": {"normalization": normalization}, "attn_implementation": attention}
    compare(accelerator, plain, change=with_episodes, **settings)


def test_what_the_prompts_of_an_episode_begin_with_together_is_computed_once_with_the_same_gradient(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(model, reference, groups):
        plain_update(model, groups, own_advantages(groups), ppo)

    for module in (forward_pack, packing):
        monkeypatch.setattr(module, "MIN_SHARED", 1)
    compare(accelerator, plain, change=partial(with_episodes, first_token=None), attn_implementation="packed")


def test_what_the_policy_did_not_sample_has_no_kl_and_no_entropy(accelerator: Accelerator) -> None:
    def plain(model, reference, groups):
        def loss(group, branch, told, advantage):
            d_T = tell(reference, group, branch).logprobs - told.logprobs
            return ppo(group, branch, told, advantage) + 0.5 * (d_T.exp() - d_T - 1) - 0.3 * told.entropy

        plain_update(model, groups, own_advantages(groups), loss)

    settings = {"kl": {"coef": 0.5}, "reference": {"kind": "fixed"}, "loss": {"entropy_coef": 0.3}}
    compare(accelerator, plain, change=with_episodes, **settings)


def test_an_episode_pays_for_the_kl_of_all_its_branches(accelerator: Accelerator) -> None:
    def plain(model, reference, groups):
        shaped = []
        for group in groups:
            with torch.no_grad():
                kls = [
                    sum(
                        float((tell(model, group, b).logprobs - tell(reference, group, b).logprobs).sum())
                        for b in branches
                    )
                    for branches in episodes_of(group)
                ]
            shaped.append([reward - 0.1 * kl for reward, kl in zip(group.rewards_G, kls, strict=True)])
        mean = [sum(rewards) / len(rewards) for rewards in shaped]
        advantages = [[reward - m for reward in rewards] for rewards, m in zip(shaped, mean, strict=True)]
        plain_update(model, groups, advantages, ppo)

    settings = {
        "kl": {"coef": 0.1, "place": "reward", "estimator": "k1"},
        "reference": {"kind": "fixed"},
        "advantage": {"scale": "none"},
    }
    compare(accelerator, plain, change=with_episodes, **settings)


def test_the_ratio_of_a_sequence_is_made_of_what_the_policy_sampled(accelerator: Accelerator) -> None:
    def plain(model, reference, groups):
        def loss(group, branch, told, advantage):
            return clipped((told.logprobs - told.behaviour).mean().exp().expand_as(told.logprobs), advantage)

        plain_update(model, groups, own_advantages(groups), loss, is_per_episode=True)

    settings = {"loss": {"objective": "gspo", "clip_low": 0.2, "clip_high": 0.28}}
    compare(accelerator, plain, change=with_episodes, **settings)


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


def test_an_episode_may_sample_more_than_a_turn_may(accelerator: Accelerator) -> None:
    """Its metrics by length too, which are by quarters of what a turn may have."""
    run = make_run(off_policy_correction={"weight": "mask", "max_weight": 1.5})
    trainer = make_moved_trainer(run, accelerator)
    groups = make_groups(trainer.policy, num_groups=1)
    (turn,) = [branch for branch in groups[0].completions if len(branch.token_ids) == MAX_TOKENS][:1]
    twice = TokenSequence(
        token_ids=np.tile(turn.token_ids, 2), behaviour_logprobs=np.tile(turn.behaviour_logprobs, 2),
        versions=turn.versions * 2, finish_reason="stop",
    )  # fmt: skip
    groups = [msgspec.structs.replace(groups[0], completions=[twice, *groups[0].completions[1:]])]
    assert train_on(trainer, groups, VERSION, StepTimer())["loss/kept_frac_length_q4"] > 0


def test_episodes_reach_the_other_ranks_as_they_are(accelerator: Accelerator) -> None:
    trainer = make_moved_trainer(make_run(), accelerator)
    groups = with_episodes(make_groups(trainer.policy, num_groups=1))
    received = unpack(pack(StepBatch(groups=groups)), StepBatch).groups
    assert received is not None and received[0].num_branches_G == groups[0].num_branches_G
    for before, after in zip(groups[0].completions, received[0].completions, strict=True):
        assert after.versions == before.versions and after.token_ids.tolist() == before.token_ids.tolist()
        assert (after.prompt_token_ids is None) == (before.prompt_token_ids is None)


def test_a_branch_whose_parts_differ_in_length_is_refused() -> None:
    with pytest.raises(ValueError, match="2 token ids, 2 behavior logprobs and versions of 3 tokens"):
        TokenSequence(
            token_ids=np.zeros(2, np.int32), behaviour_logprobs=np.zeros(2, np.float32), versions=[(None, 3)], finish_reason="stop"
        )  # fmt: skip
