"""The oracle of `train_on`: a step per branch, unpadded, in float64, with plain gradient descent; and the cases of
both."""

import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch

from learner.environments.episode import TokenSequence
from learner.rollouts.rollout_group import RolloutGroup
from tests.learner.policy.plain import plain_logits
from tests.learner.training.fixed_groups import VERSION

LEARNING_RATE = 0.1


class Branch(msgspec.Struct, eq=False):
    """Values of the sampled tokens of a branch."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    """Logprobs and entropies of the current policy, with a gradient."""
    started: torch.Tensor
    started_entropy: torch.Tensor
    """Logprobs of the policy at the start of the step."""
    behavior: torch.Tensor
    reference: torch.Tensor
    ages: torch.Tensor
    advantages: torch.Tensor
    picked: torch.Tensor
    """1 for the tokens that the rule picked over the whole step."""


def ppo(branch: Branch) -> torch.Tensor:
    return clipped(branch, (branch.logprobs - branch.behavior).exp())


def clipped(branch: Branch, ratio_T: torch.Tensor) -> torch.Tensor:
    advantages_T = branch.advantages
    objective_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.28) * advantages_T)
    return -torch.where(advantages_T < 0, objective_T.maximum(3 * advantages_T), objective_T)


class Rule(msgspec.Struct, frozen=True):
    """The configuration of a step. `loss` returns the loss of each sampled token of a branch."""

    loss: Callable[[Branch], torch.Tensor] = ppo
    num_updates: int = 1
    is_per_episode: bool = False
    """Whether the mean is over episodes of the means of their tokens, instead of over all tokens."""
    leaves_out_truncated: bool = False
    kl_in_reward: float | None = None
    """Divisor of rewards, instead of the deviation."""
    top_entropy: float = 1.0
    pick: Callable[[list[float]], set[int]] | None = None
    """Returns the picked ones of the step's tokens, given their covariances."""
    is_by_turn: bool = False
    """Whether each turn has the advantage of its return-to-go, instead of that of its episode."""


def decoupled(branch: Branch) -> torch.Tensor:
    weight_T = (branch.started - branch.behavior).exp().clamp(max=1.3)
    return weight_T * clipped(branch, (branch.logprobs - branch.started).exp())


def log_linear(branch: Branch) -> torch.Tensor:
    share_T = branch.ages / (branch.ages + 1)
    proximal_T = (branch.behavior + share_T * (branch.logprobs - branch.behavior)).detach()
    weight_T = (proximal_T - branch.behavior).exp().clamp(max=2.0)
    return weight_T * clipped(branch, (branch.logprobs - proximal_T).exp())


def gspo(branch: Branch) -> torch.Tensor:
    ratio = (branch.logprobs - branch.behavior).mean().exp()
    return clipped(branch, ratio.expand_as(branch.logprobs))


def k3(branch: Branch) -> torch.Tensor:
    d_T = branch.reference - branch.logprobs
    return d_T.exp() - d_T - 1


def with_weighted_kl(branch: Branch) -> torch.Tensor:
    return ppo(branch) + 0.5 * (branch.logprobs - branch.behavior).exp() * k3(branch)


def vespo(branch: Branch) -> torch.Tensor:
    w = (branch.logprobs - branch.behavior).sum().exp().detach()
    advantage = branch.advantages[0]
    power, decay = (2, 3) if advantage >= 0 else (3, 2)
    return -(w**power) * (decay * (1 - w)).exp() * advantage * branch.logprobs


def kl_cov(branch: Branch) -> torch.Tensor:
    log_ratio_T = branch.logprobs - branch.behavior
    advantage = branch.advantages[0]
    surrogate_T = log_ratio_T.exp() * advantage
    surrogate_T = surrogate_T.clamp(min=1.05 * advantage) if advantage < 0 else surrogate_T
    return -surrogate_T + branch.picked * log_ratio_T.abs()


def highest(share: float) -> Callable[[list[float]], set[int]]:
    return lambda covariances: set(
        sorted(range(len(covariances)), key=lambda i: -covariances[i])[: int(share * len(covariances))]
    )


FIXED = {"reference": {"kind": "fixed"}}
FALLING = {"learning_rate": 2 * LEARNING_RATE, "schedule": "linear", "max_grad_norm": 1e9}
"""Half of the peak at version 5 of 10: all updates of a step have the learning rate of its version."""
CASES: dict[str, tuple[dict[str, Any], Rule]] = {
    "several updates clip against the stored logprobs": (
        {"updates_per_batch": 3, "optimizer": FALLING}, Rule(num_updates=3),
    ),
    "the mean over episodes": ({"loss": {"normalization": "sequence"}}, Rule(is_per_episode=True)),
    "padded": ({"loss": {"normalization": "sequence"}, "attn_implementation": "sdpa"}, Rule(is_per_episode=True)),
    "decoupled PPO holds the proximal policy over the updates": (
        {"updates_per_batch": 2, "off_policy_correction": {"anchor": "proximal", "weight": "truncate",
            "max_weight": 1.3}},
        Rule(decoupled, num_updates=2),
    ),
    "the log-linear proximal policy goes by each token's version": (
        {"off_policy_correction": {"anchor": "proximal", "proximal": "log_linear", "weight": "truncate"}},
        Rule(log_linear),
    ),
    "tokens beyond a staleness are left out and stay in the denominator": (
        {"off_policy_correction": {"max_token_staleness": 2}}, Rule(lambda branch: (branch.ages <= 2) * ppo(branch)),
    ),
    "what is truncated is left out of the mean and stays in the baseline": (
        {"loss": {"mask_truncated": True}}, Rule(leaves_out_truncated=True),
    ),
    "the ratio of a sequence is made of what the policy sampled": (
        {"loss": {"objective": "gspo", "clip_low": 0.2, "clip_high": 0.28}}, Rule(gspo, is_per_episode=True),
    ),
    "a KL in the reward changes the advantages and nothing else": (
        {"kl": {"coef": 0.2, "place": "reward", "estimator": "k1"}, "advantage": {"scale": "none"}, **FIXED},
        Rule(kl_in_reward=0.2),
    ),
    "a KL in the loss is measured against one reference over all updates": (
        {"kl": {"coef": 0.5, "importance_weighted": True}, "updates_per_batch": 2, **FIXED},
        Rule(with_weighted_kl, num_updates=2),
    ),
    "an entropy bonus raises the entropy of every trained token": (
        {"loss": {"entropy_coef": 0.3}}, Rule(lambda branch: ppo(branch) - 0.3 * branch.entropy),
    ),
    "the tokens of highest entropy of the whole step carry the objective": (
        {"loss": {"top_entropy_frac": 0.2}, "micro_batch_tokens": 30}, Rule(top_entropy=0.2),
    ),
    "a completion is weighted by its whole ratio": ({"loss": {"objective": "vespo"}}, Rule(vespo)),
    "the tokens of highest covariance of the whole step pay for moving": (
        {"loss": {"objective": "kl_cov", "cov_frac": 0.3, "dual_clip": 1.05}, "micro_batch_tokens": 30},
        Rule(kl_cov, pick=highest(0.3)),
    ),
    "the tokens of the whole step with a covariance in the band have no gradient": (
        {"loss": {"objective": "clip_cov", "clip_high": 0.28, "cov_frac": 1.0, "cov_low": 0.1, "cov_high": 1.0},
            "micro_batch_tokens": 30},
        Rule(
            lambda branch: ppo(branch) * (1 - branch.picked),
            pick=lambda covariances: {i for i, covariance in enumerate(covariances) if 0.1 < covariance < 1},
        ),
    ),
}  # fmt: skip


def episodes_of(group: RolloutGroup) -> list[list[TokenSequence]]:
    starts = np.cumsum([0, *(group.num_branches_G or [1] * len(group.completions))])
    return [group.completions[start:end] for start, end in pairwise(starts)]


def owners_of(branch: TokenSequence) -> list[int | None]:
    return [version for version, count in branch.versions for _ in range(count)]


def tell(model: torch.nn.Module, group: RolloutGroup, branch: TokenSequence) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprob and entropy of each sampled token of a branch."""
    prompt = (group.prompt_token_ids if branch.prompt_token_ids is None else branch.prompt_token_ids).tolist()
    tokens = torch.tensor(prompt + branch.token_ids.tolist())
    logprobs_TV = plain_logits(model, tokens[None])[0, len(prompt) - 1 : -1].log_softmax(-1)
    sampled = [index for index, version in enumerate(owners_of(branch)) if version is not None]
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV.gather(1, tokens[len(prompt) :, None])[sampled, 0], entropy_T[sampled]


class Extremes(msgspec.Struct):
    """Return the ratios to the behavior policy, and the largest share of a token in an update's gradient."""

    ratio_min: float = math.inf
    ratio_max: float = 0.0
    max_token_share: float = 0.0


def plain_step(model: torch.nn.Module, reference: torch.nn.Module, groups: list[RolloutGroup], rule: Rule) -> Extremes:
    """Train the model, which is in float64 like the reference."""
    extremes = Extremes()
    episodes_P_G = [episodes_of(group) for group in groups]
    pairs = [(group, one) for group, episodes in zip(groups, episodes_P_G, strict=True) for e in episodes for one in e]
    with torch.no_grad():
        started = {id(one): tell(model, group, one) for group, one in pairs}
        references = {id(one): tell(reference, group, one)[0] for group, one in pairs}
    entropies = sorted((float(entropy) for _, entropy_T in started.values() for entropy in entropy_T), reverse=True)
    floor = entropies[round(rule.top_entropy * len(entropies)) - 1] - 1e-7

    picked = picks_of(groups, episodes_P_G, {key: value for key, (value, _) in started.items()}, rule)

    def kl_of(episode: list[TokenSequence]) -> float:
        return sum(float((started[id(one)][0] - references[id(one)]).sum()) for one in episode)

    def branch_of(group: RolloutGroup, one: TokenSequence, advantages: list[float]) -> Branch:
        known: dict[str, Any] = dict(zip(("started", "started_entropy"), started[id(one)], strict=True))
        known |= dict(zip(("logprobs", "entropy"), tell(model, group, one), strict=True))
        sampled = [version for version in owners_of(one) if version is not None]
        behavior = torch.from_numpy(one.behavior_logprobs[[v is not None for v in owners_of(one)]]).double()
        ages = torch.tensor([VERSION - version for version in sampled], dtype=torch.float64)
        turns = [turn for turn, count in one.turns or [(0, len(sampled))] for _ in range(count)]
        return Branch(
            behavior=behavior,
            reference=references[id(one)],
            ages=ages,
            advantages=torch.tensor([advantages[turn] for turn in turns], dtype=torch.float64),
            picked=picked[id(one)],
            **known,
        )

    def kept(episode: list[TokenSequence]) -> list[TokenSequence]:
        return [] if rule.leaves_out_truncated and episode[-1].finish_reason == "length" else episode

    def num_tokens(episodes: list[list[TokenSequence]]) -> int:
        return sum(len(references[id(one)]) for episode in episodes for one in kept(episode))

    for _ in range(rule.num_updates):
        model.zero_grad()
        total, pulls = torch.zeros((), dtype=torch.float64), []
        for group, episodes in zip(groups, episodes_P_G, strict=True):
            kls = [kl_of(episode) for episode in episodes]
            for episode, advantages in zip(episodes, advantages_of(group, kls, rule), strict=True):
                num_all = sum(map(num_tokens, episodes_P_G))
                if rule.is_per_episode:
                    num_all = num_tokens([episode]) * sum(map(len, episodes_P_G))
                for one in kept(episode):
                    branch = branch_of(group, one, advantages)
                    loss = (rule.loss(branch) * (branch.started_entropy >= floor)).sum() / num_all
                    total = total + loss
                    pulls += torch.autograd.grad(loss, branch.logprobs, retain_graph=True)[0].abs().tolist()
                    ratios = (branch.logprobs - branch.behavior).exp().tolist()
                    extremes.ratio_min, extremes.ratio_max = (
                        min(extremes.ratio_min, *ratios),
                        max(extremes.ratio_max, *ratios),
                    )
        extremes.max_token_share = max(extremes.max_token_share, max(pulls) / sum(pulls))
        total.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LEARNING_RATE * parameter.grad
    return extremes


def picks_of(
    groups: list[RolloutGroup],
    episodes_P_G: list[list[list[TokenSequence]]],
    started: dict[int, torch.Tensor],
    rule: Rule,
) -> dict[int, torch.Tensor]:
    """Return the picked tokens of each branch. Every group has signal and no turns, so that every token is trained."""
    tokens = [
        (id(one), logprob, advantage)
        for group, episodes in zip(groups, episodes_P_G, strict=True)
        for episode, (advantage, *_) in zip(episodes, advantages_of(group, [0.0] * len(episodes), rule), strict=True)
        for one in episode
        for logprob in started[id(one)].tolist()
    ]
    mean_logprob = statistics.mean(logprob for _, logprob, _ in tokens)
    mean_advantage = statistics.mean(advantage for _, _, advantage in tokens)
    covariances = [(logprob - mean_logprob) * (advantage - mean_advantage) for _, logprob, advantage in tokens]
    picked = rule.pick(covariances) if rule.pick else set()
    return {
        key: torch.tensor([float(i in picked) for i, (owner, _, _) in enumerate(tokens) if owner == key])
        for key in started
    }


def advantages_of(group: RolloutGroup, kls: list[float], rule: Rule) -> list[list[float]]:
    """Return the advantages of each episode's turns. Without turns, the advantage of turn 0."""
    rewards: list[float] = [reward for reward in group.rewards_G if reward is not None]
    if rule.is_by_turn:
        return advantages_by_turn(group, rewards)
    if rule.kl_in_reward is not None:
        shaped = [reward - rule.kl_in_reward * kl for reward, kl in zip(rewards, kls, strict=True)]
        return [[reward - statistics.mean(shaped)] for reward in shaped]
    return [[(reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4)] for reward in rewards]


def advantages_by_turn(group: RolloutGroup, totals: list[float]) -> list[list[float]]:
    """Return what each turn and the later ones earned, relative to the other episodes, with weight 2 for the rewards.

    The formula of docs/credit.md, unscaled, with a baseline of others only.
    """
    past = [[2 * sum(turn.reward or 0.0 for turn in turns[:k]) for k in range(len(turns))] for turns in group.turns_G]
    found = []
    for i, (total, of_turns) in enumerate(zip(totals, past, strict=True)):
        others = [(totals[j], past[j]) for j in range(len(totals)) if j != i]
        expected = statistics.mean(other for other, _ in others)
        found.append([])
        for k, earned in enumerate(of_turns):
            left = [other - its_past[k] for other, its_past in others if len(its_past) > k]
            found[-1].append(total - earned - statistics.mean([*left, expected - earned]))
    return found
