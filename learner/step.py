"""One optimizer step's numbers: forward and backward over the micro-batches, and the metrics of a batch of groups.

Suffixes: B rows, T predicted tokens.
"""

import statistics
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import nn

from learner.advantages import combined_advantages, step_advantages
from learner.batch import MicroBatch, ScoredGroup, micro_batches, training_rows
from learner.config import LearnerConfig
from learner.loss import policy_loss
from learner.policy import token_logprobs
from learner.ranks import my_rows
from learner.reference import Reference

Sums = dict[str, torch.Tensor]


def forward_backward(
    accelerator: Accelerator,
    policy: nn.Module,
    reference: Reference | None,
    groups: list[ScoredGroup],
    version: int,
    config: LearnerConfig,
) -> dict[str, float]:
    """Accumulate the gradient of the step's loss in `policy`; return the metrics of all ranks' tokens."""
    advantages_P_G = advantages(groups, config)
    rows = training_rows(groups, advantages_P_G, config.loss.normalization, config.sampling.max_tokens)
    batches = list(micro_batches(my_rows(accelerator, rows), config.micro_batch_tokens, accelerator.device))
    total: Sums = {}
    for i, batch in enumerate(batches):
        is_last = i == len(batches) - 1
        with nullcontext() if is_last else accelerator.no_sync(policy):
            loss, sums = _micro_batch_loss(policy, reference, batch, version, config)
            # DDP averages gradients over ranks; the loss is already a share of the global token mean.
            accelerator.backward(loss * accelerator.num_processes)
        total = {name: total.get(name, 0.0) + value for name, value in sums.items()}
    total = {name: accelerator.reduce(value, "sum") for name, value in total.items()}
    metrics = _loss_metrics({name: value.item() for name, value in total.items()})
    return metrics | {"batch/no_signal_groups": float(sum(not any(advantages_G) for advantages_G in advantages_P_G))}


def advantages(groups: list[ScoredGroup], config: LearnerConfig) -> list[list[float]]:
    """The advantages_P_G of the groups of one step, as the config combines the reward functions."""
    if config.advantage.combine == "sum":
        return step_advantages([group.rewards_G for group in groups], config.advantage)
    weights = config.reward.weights or (1.0,) * len(config.reward.names)
    by_name = dict(zip(config.reward.names, weights, strict=True))
    return combined_advantages([group.rewards_by_function for group in groups], by_name, config.advantage)


def _micro_batch_loss(
    policy: nn.Module,
    reference: Reference | None,
    batch: MicroBatch,
    version: int,
    config: LearnerConfig,
) -> tuple[torch.Tensor, Sums]:
    logprobs_BT, entropy_BT = token_logprobs(policy, batch, config.sampling.temperature)
    loss, sums = policy_loss(
        logprobs_BT=logprobs_BT,
        behaviour_logprobs_BT=batch.behaviour_logprobs_BT,
        advantages_B=batch.advantages_B,
        weights_B=batch.weights_B,
        mask_BT=batch.mask_BT,
        reference_logprobs_BT=None if reference is None else reference.logprobs(batch),
        config=config.loss,
    )
    # Only completions of this version alone, prompt included: older tokens leave keys and values of older weights behind.
    is_fresh_B = ((batch.versions_BT == version) | ~batch.mask_BT).all(dim=1) & (batch.entered_versions_B == version)
    fresh_BT = batch.mask_BT & is_fresh_B.unsqueeze(1)
    mismatch_BT = (logprobs_BT.detach() - batch.behaviour_logprobs_BT).abs()
    sums["entropy"] = torch.where(batch.mask_BT, entropy_BT, 0.0).sum()
    sums["fresh_tokens"] = fresh_BT.sum().float()
    sums["fresh_mismatch"] = torch.where(fresh_BT, mismatch_BT, 0.0).sum()
    return loss, sums


def _loss_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Turn sums into means over the tokens trained on; the loss is weighed already."""
    trained = max(sums["tokens"], 1.0)
    metrics = {
        "loss/policy": sums["loss"],
        "loss/clipped_frac": sums["clipped"] / trained,
        "policy/entropy": sums["entropy"] / trained,
        "policy/mismatch_kl": sums["mismatch_kl"] / trained,
    }
    if sums["fresh_tokens"]:
        metrics["policy/mismatch_abs_logprob"] = sums["fresh_mismatch"] / sums["fresh_tokens"]
    if "reference_kl" in sums:
        metrics["reference/kl"] = sums["reference_kl"] / trained
    return metrics


def group_metrics(groups: list[ScoredGroup], version: int) -> dict[str, float]:
    """Rewards, lengths and staleness of the groups of one step."""
    rewards = [reward for group in groups for reward in group.rewards_G if reward is not None]
    completions = [completion for group in groups for completion in group.completions]
    stalenesses = [staleness(group, version) for group in groups]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": statistics.pstdev(rewards) if rewards else 0.0,
        "reward/timed_out": float(sum(group.num_timed_out for group in groups)),
        "batch/unscorable_completions": float(sum(reward is None for group in groups for reward in group.rewards_G)),
        "staleness/mean": _mean([float(value) for value in stalenesses]),
        "staleness/max": float(max(stalenesses)),
        "rollout/completion_length_mean": _mean([float(len(completion.token_ids)) for completion in completions]),
        "rollout/truncated_frac": _mean([float(completion.finish_reason == "length") for completion in completions]),
        "rollout/tokens": float(sum(group.num_tokens for group in groups)),
    }
    for name in groups[0].rewards_by_function:
        values = [value for group in groups for value in group.rewards_by_function[name] if value is not None]
        metrics[f"reward/{name}"] = _mean(values)
    return metrics


def staleness(group: ScoredGroup, version: int) -> int:
    """Learner's version minus the oldest in the group; groups kept over a resume may carry newer ones, which count as 0."""
    return max(0, version - group.oldest_version)


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0
