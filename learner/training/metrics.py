"""The metrics of a step, from sums over its tokens and from its groups. Names: DESIGN's `area/name`."""

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from learner.algorithm.loss import Sums
from learner.config import LearnerConfig
from learner.environments.branch import Branch
from learner.policy.memory import GIB
from learner.rollouts.scored_group import ScoredGroup


def loss_metrics(total: Sums, config: LearnerConfig) -> dict[str, float]:
    """Turn sums over all updates and ranks into means over the tokens trained on.

    policy/ess is the effective sample size as a share: (Σ r)² / (n Σ r²), r the ratio to the behaviour policy.
    """
    sums = {name: value.item() for name, value in total.items() if value.dim() == 0}
    trained = max(sums["tokens"], 1.0)
    metrics = {
        "loss/policy": sums["loss"] / config.updates_per_batch,
        "loss/clipped_frac": sums["clipped"] / trained,
    }
    if sums["tokens"]:  # without tokens nothing was measured; 0 would look like agreement
        metrics["policy/entropy"] = sums["entropy"] / trained
        metrics["policy/behaviour_kl"] = sums["behaviour_kl"] / trained
        metrics["policy/ratio_mean"] = sums["ratio"] / trained
        metrics["policy/ess"] = sums["ratio"] ** 2 / (trained * sums["ratio_squared"])
        if "reference_kl" in sums:
            metrics["reference/kl"] = sums["reference_kl"] / trained
        if config.rejects_tokens:
            metrics |= _correction_metrics(sums, total, trained)
    if sums["fresh_tokens"]:
        metrics["policy/mismatch_abs_logprob"] = sums["fresh_mismatch"] / sums["fresh_tokens"]
    return metrics


def _correction_metrics(sums: dict[str, float], total: Sums, trained: float) -> dict[str, float]:
    metrics = {
        "loss/kept_frac": sums["kept"] / trained,
        "correction/bounded_frac": sums["bounded"] / trained,
        "correction/stale_frac": sums["stale"] / trained,
    }
    by_quarter = zip(total["kept_by_quarter"].tolist(), total["tokens_by_quarter"].tolist(), strict=True)
    for quarter, (kept, tokens) in enumerate(by_quarter, start=1):
        if tokens:
            metrics[f"loss/kept_frac_length_q{quarter}"] = kept / tokens
    return metrics


def group_metrics(groups: list[ScoredGroup], version: int) -> dict[str, float]:
    """Rewards, lengths and staleness of the groups of one step. What no completion was scored for has no mean, not a mean of 0."""
    rewards = [reward for group in groups for reward in _scored(group)]
    episodes = [branches for group in groups for branches in group.branches_G]
    stalenesses = [staleness(group, version) for group in groups]
    lengths = [sum(branch.num_sampled for branch in branches) for branches in episodes]
    p10, p50, p90 = np.percentile(lengths, (10, 50, 90)).tolist()
    metrics = {
        "batch/unscorable_completions": float(sum(reward is None for group in groups for reward in group.rewards_G)),
        "staleness/mean": statistics.fmean(stalenesses),
        "staleness/max": float(max(stalenesses)),
        "rollout/completion_length_mean": statistics.fmean(lengths),
        "rollout/completion_length_p10": p10,
        "rollout/completion_length_p50": p50,
        "rollout/completion_length_p90": p90,
        "rollout/completion_length_max": float(max(lengths)),
        "rollout/truncated_frac": statistics.fmean(branches[-1].finish_reason == "length" for branches in episodes),
        "rollout/nonfinite_logprobs": float(sum(num_nonfinite(one) for branches in episodes for one in branches)),
        "rollout/tokens": float(sum(group.num_tokens for group in groups)),
    }
    within = [statistics.pstdev(scored) for group in groups if len(scored := _scored(group)) > 1]
    if within:
        metrics["batch/group_reward_std"] = statistics.fmean(within)
    if rewards:
        metrics |= {"reward/mean": statistics.fmean(rewards), "reward/std": statistics.pstdev(rewards)}
    for name in groups[0].rewards_by_function:
        values = [value for group in groups for value in group.rewards_by_function[name] if value is not None]
        if values:
            metrics[f"reward/{name}"] = statistics.fmean(values)
    return metrics | episode_metrics(groups)


def episode_metrics(groups: list[ScoredGroup]) -> dict[str, float]:
    """How the episodes went; nothing where there is no environment."""
    courses = [course for group in groups for course in group.courses_G]
    if not courses:
        return {}
    said = sum(len(branch.token_ids) - branch.num_sampled for group in groups for branch in group.completions)
    num_prompt_tokens = sum(course.num_prompt_tokens for course in courses)
    metrics = {
        "episode/turns_mean": statistics.fmean(course.num_turns for course in courses),
        "episode/branches_mean": statistics.fmean(len(branches) for group in groups for branches in group.branches_G),
        "episode/tool_calls": float(sum(course.num_calls for course in courses)),
        "episode/failed_calls": float(sum(course.num_failed_calls for course in courses)),
        "episode/environment_tokens": float(said),
        "episode/environment_seconds": statistics.fmean(course.environment_s for course in courses),
    }
    metrics |= {f"episode/{state}": float(count) for state, count in Counter(one.state for one in courses).items()}
    if num_prompt_tokens:
        metrics["episode/cached_frac"] = sum(course.num_cached_tokens for course in courses) / num_prompt_tokens
    return metrics


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Of this rank: the most memory of the GPU that tensors have held since the last call, and what the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    metrics = {"memory/host_gib": pages * os.sysconf("SC_PAGE_SIZE") / GIB}
    if device.type == "cuda":
        metrics["memory/device_peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return metrics


def _scored(group: ScoredGroup) -> list[float]:
    return [reward for reward in group.rewards_G if reward is not None]


def num_nonfinite(branch: Branch) -> int:
    """Tokens whose behaviour logprob is no number; they are left out of everything."""
    return int((~np.isfinite(branch.behaviour_logprobs)).sum())


def staleness(group: ScoredGroup, version: int) -> int:
    """Learner's version minus the oldest in the group; groups kept over a resume may carry newer ones, which count as 0."""
    return max(0, version - group.oldest_version)


class StepTimer:
    """Wall time of the named phases of one step; what no phase covers is `other`."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + time.monotonic() - started

    def metrics(self) -> dict[str, float]:
        """Return time/<phase>, time/other and time/step in seconds."""
        step_s = time.monotonic() - self._started
        phases = self._phases | {"other": step_s - sum(self._phases.values()), "step": step_s}
        return {f"time/{phase}": seconds for phase, seconds in phases.items()}
