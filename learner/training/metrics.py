"""Metrics of a step, computed from its token sums, groups and timings. docs/metrics.md explains each.

    loss of each micro-batch ─▶ sums, RatioRange, Mismatch ─▶ all ranks ─▶ metrics of the step
    counts, seconds ─▶ throughput: operations of N tokens = 6 · P · N + 12 · L · H · (query, key) pairs

RatioRange holds what a mean hides: the extreme ratios, and one token's share of an update's gradient.
Mismatch measures the logprob difference to each server, so that a wrong server stands out. The arithmetic
counts forward and backward passes of the whole model, with the P parameters that are active per token. It
excludes recomputation by checkpointing, the reference pass and padding. It does not subtract what LoRA or a
cut last layer saves.
Suffixes: U updates, N micro-batches, ranks or episodes of the step (M, R), B branches, T tokens of the
longest.
"""

import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, get_args

import numpy as np
import psutil
import torch
from accelerate import Accelerator

from learner.algorithm.credit import anchored_frac
from learner.algorithm.loss import Sums
from learner.config import LearnerConfig
from learner.config.rewards import MAX_TURNS
from learner.environments.episode import EndState, TokenSequence
from learner.policy.memory import GIB
from learner.policy.model_shape import ModelShape
from learner.rollouts.rollout_group import RolloutGroup
from learner.training.batch import MicroBatch
from learner.training.packing import Piece, num_pairs, num_tokens

MAX_NATS = 20.0
"""Bound on the absolute log-ratio, in nats, as in the loss."""
MIN_PULL = 1e-12
"""Lower bound for the pull by weight and advantage, which is 0 where the advantage is 0."""
PEAK_TFLOPS = {
    "B200": 2250.0, "H200": 989.0, "H200 NVL": 835.0, "H100": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0,
    "GH200": 989.0, "A100": 312.0, "A100 PCIe": 312.0, "L40S": 362.0, "A10": 125.0, "RTX 4090": 165.0,
}  # fmt: skip
"""Peak dense bfloat16 TFLOPS by the words of the device name."""
VARIANTS = {"pcie", "nvl", "mig", "laptop", "d"}
"""Words of device names whose peak differs from that of the device without the word."""
TERA = 1e12


def loss_metrics(total: Sums, config: LearnerConfig) -> dict[str, float]:
    """Turn sums over all updates and ranks into means over the trained tokens.

    policy/ess is the effective sample size as a share: (Σ r)² / (n Σ r²), with r the ratio to the behavior
    policy.
    """
    sums = {name: value.item() for name, value in total.items() if value.dim() == 0}
    trained = max(sums["tokens"], 1.0)
    metrics = {
        "loss/policy": sums["loss"] / config.updates_per_batch,
        "loss/clipped_frac": sums["clipped"] / trained,
    }
    if sums["tokens"]:  # without tokens nothing was measured, and 0 would look like agreement
        metrics["policy/entropy"] = sums["entropy"] / trained
        metrics["policy/behavior_kl"] = sums["behavior_kl"] / trained
        metrics["policy/ratio_mean"] = sums["ratio"] / trained
        metrics["policy/ess"] = sums["ratio"] ** 2 / (trained * sums["ratio_squared"])
        if "reference_kl" in sums:
            metrics["reference/kl"] = sums["reference_kl"] / trained
            metrics["reference/reverse_kl"] = sums["reverse_kl"] / trained
        if config.rejects_tokens:
            metrics |= _correction_metrics(sums, total, trained)
    if "routing_choices" in sums:
        metrics["routing/unreplayed_tokens"] = sums["unreplayed_tokens"] / config.updates_per_batch
        if sums["routing_choices"]:
            metrics["routing/changed_frac"] = sums["routing_changed"] / sums["routing_choices"]
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


def routing_sums(batch: MicroBatch) -> Sums:
    """Return the counts of a micro-batch that `loss_metrics` reads with routing replay."""
    device = batch.mask_BT.device
    num_choices, num_changed = (0, 0.0) if batch.routing is None else batch.routing.pop_counts()
    return {
        "unreplayed_tokens": torch.tensor(batch.num_unreplayed, device=device).float(),
        "routing_choices": torch.tensor(num_choices, device=device).float(),
        "routing_changed": torch.as_tensor(num_changed, device=device).float(),
    }


def group_metrics(groups: list[RolloutGroup], version: int) -> dict[str, float]:
    """Return rewards, lengths and staleness of the groups of one step.

    A reward that no completion has gets no mean, rather than a mean of 0.
    """
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
    if rewards and groups[0].rewards_by_function:
        metrics |= {"reward/mean": statistics.fmean(rewards), "reward/std": statistics.pstdev(rewards)}
    for name in groups[0].rewards_by_function:
        values = [value for group in groups for value in group.rewards_by_function[name] if value is not None]
        if values:
            metrics[f"reward/{name}"] = statistics.fmean(values)
    return metrics | episode_metrics(groups)


def episode_metrics(groups: list[RolloutGroup]) -> dict[str, float]:
    """Return statistics of the episodes, or nothing without an environment."""
    stats = [one for group in groups for one in group.stats_G]
    if not stats:
        return {}
    num_others = sum(len(branch.token_ids) - branch.num_sampled for group in groups for branch in group.completions)
    num_prompt_tokens = sum(one.num_prompt_tokens for one in stats)
    metrics = {
        "episode/turns_mean": statistics.fmean(one.num_turns for one in stats),
        "episode/branches_mean": statistics.fmean(len(branches) for group in groups for branches in group.branches_G),
        "episode/tool_calls": float(sum(one.num_calls for one in stats)),
        "episode/failed_calls": float(sum(one.num_failed_calls for one in stats)),
        "episode/environment_tokens": float(num_others),
        "episode/environment_seconds": statistics.fmean(one.environment_s for one in stats),
    }
    ends = Counter(one.state for one in stats)
    metrics |= {f"episode/{state}": float(ends[state]) for state in get_args(EndState)}
    if num_prompt_tokens:
        metrics["episode/cached_frac"] = sum(one.num_cached_tokens for one in stats) / num_prompt_tokens
    return metrics | turn_metrics(groups)


def turn_metrics(groups: list[RolloutGroup]) -> dict[str, float]:
    """Return the mean reward of all turns and of each of the first turns, and how many turns share their state."""
    rated = [
        (number, turn.reward)
        for group in groups
        for turns in group.turns_G
        for number, turn in enumerate(turns, start=1)
        if turn.reward is not None
    ]
    metrics = {"reward/turn_mean": statistics.fmean(reward for _, reward in rated)} if rated else {}
    for number in range(1, MAX_TURNS + 1):
        if rewards := [reward for of_turn, reward in rated if of_turn == number]:
            metrics[f"reward/turn_{number}"] = statistics.fmean(rewards)
    states_P_G_K = [[[turn.state for turn in turns] for turns in group.turns_G] for group in groups]
    return metrics | {"episode/anchored_frac": anchored_frac(states_P_G_K)}


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return this rank's peak GPU memory since the last call and its host memory now."""
    metrics = {"memory/host_gib": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        metrics["memory/device_peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return metrics


def _scored(group: RolloutGroup) -> list[float]:
    return [reward for reward in group.rewards_G if reward is not None]


def num_nonfinite(branch: TokenSequence) -> int:
    """Count the tokens whose behavior logprob is NaN or inf, which training excludes."""
    return int((~np.isfinite(branch.behavior_logprobs)).sum())


def staleness(group: RolloutGroup, version: int) -> int:
    """Return how many versions the group's oldest token is behind the learner.

    A group kept over a resume may carry a newer version, which counts as 0.
    """
    return max(0, version - group.oldest_version)


class StepTimer:
    """Wall-clock time of the named phases of a step; the rest is `other`.

    A step begins where the previous one was measured, so that no time is between them.
    """

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

    def pop_metrics(self) -> dict[str, float]:
        """Return time/<phase>, time/other and time/step in seconds, and begin the next step."""
        now = time.monotonic()
        step_s = now - self._started
        phases = self._phases | {"other": step_s - sum(self._phases.values()), "step": step_s}
        self._started, self._phases = now, {}
        return {f"time/{phase}": seconds for phase, seconds in phases.items()}


class RatioRange:
    """Extreme ratios and gradient shares since the last `pop_metrics`."""

    def __init__(self) -> None:
        self._seen: list[torch.Tensor] = []
        """Per micro-batch: negated lowest log-ratio, highest log-ratio, largest pull, its multiplier, and the
        sum of pulls. The tensors stay on the GPU, because reading them now would wait for it."""

    def update(self, log_ratio_BT: torch.Tensor, pull_BT: torch.Tensor, plain_pull_BT: torch.Tensor) -> None:
        """Record log-ratios to the behavior policy and pulls, |∂ loss / ∂ logprob|.

        Both are 0 outside the mask: a ratio of 1 is never extreme. `plain_pull_BT` is the pull by weight and
        advantage alone.
        """
        low, high = log_ratio_BT.float().nan_to_num().aminmax()
        pull_BT = pull_BT.float().nan_to_num()
        heaviest = pull_BT.argmax()
        pull, plain_pull = pull_BT.flatten()[heaviest], plain_pull_BT.flatten()[heaviest].float()
        self._seen.append(torch.stack([-low, high, pull, pull / plain_pull.clamp(min=MIN_PULL), pull_BT.sum()]))

    def pop_metrics(self, accelerator: Accelerator, num_updates: int) -> dict[str, float]:
        """Return the metrics since the last call, over all ranks.

        Every rank must call this. Each update has the same number of micro-batches.

            loss/max_token_share: largest share of one token in Σ |∂ loss / ∂ logprob| over an update's tokens
            loss/max_token_multiplier: that token's pull, relative to the pull by weight and advantage alone
        """
        nothing = [torch.zeros(5, device=accelerator.device)] * num_updates
        seen_UM5 = torch.stack(self._seen or nothing).view(num_updates, -1, 5)
        self._seen.clear()
        of_ranks_RU5 = accelerator.gather(_joined(seen_UM5).unsqueeze(0))
        all_U5 = _joined(of_ranks_RU5.transpose(0, 1))
        low, high = all_U5[:, :2].amax(dim=0).tolist()
        metrics = {"policy/ratio_min": math.exp(-min(low, MAX_NATS)), "policy/ratio_max": math.exp(min(high, MAX_NATS))}
        shares = [(pull / total, multiplier) for _, _, pull, multiplier, total in all_U5.tolist() if total > 0]
        return metrics | dict(
            zip(("loss/max_token_share", "loss/max_token_multiplier"), max(shares, default=()), strict=False)
        )


def _joined(seen_UN5: torch.Tensor) -> torch.Tensor:
    """Reduce each update over its micro-batches or ranks."""
    heaviest_U11 = seen_UN5[..., 2:3].argmax(dim=1, keepdim=True)
    heaviest_U2 = seen_UN5[..., 2:4].gather(1, heaviest_U11.expand(-1, -1, 2)).squeeze(1)
    return torch.cat([seen_UN5[..., :2].amax(dim=1), heaviest_U2, seen_UN5[..., 4:].sum(dim=1)], dim=1)


class Mismatch:
    """Logprob differences to the servers since the last `pop_by_server`."""

    def __init__(self) -> None:
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Per micro-batch: episodes_B, and per branch the sum and number of tokens, on their device."""

    def update(self, episodes_B: torch.Tensor, fresh_BT: torch.Tensor, mismatch_BT: torch.Tensor) -> None:
        """Record |Δ logprob| of the fresh tokens."""
        sums_B = torch.where(fresh_BT, mismatch_BT, 0.0).sum(dim=1)
        self._seen.append((episodes_B, torch.stack([sums_B.double(), fresh_BT.sum(dim=1).double()], dim=1)))

    def pop_by_server(self, accelerator: Accelerator, groups: list[RolloutGroup]) -> dict[str, float]:
        """Return each server's mean over all ranks, by endpoint. Servers without a finite value are left out.

        Every rank must call this.
        """
        seen, self._seen = self._seen, []
        servers = sorted({group.server for group in groups})
        server_N = torch.tensor([servers.index(group.server) for group in groups for _ in group.rewards_G])
        sums = torch.zeros(len(servers), 2, dtype=torch.float64, device=accelerator.device)
        for episodes_B, sums_B in seen:
            sums.index_add_(0, server_N.to(accelerator.device)[episodes_B], sums_B)
        totals = accelerator.reduce(sums, "sum").tolist()
        return {
            server: total / num_tokens
            for server, (total, num_tokens) in zip(servers, totals, strict=True)
            if num_tokens and math.isfinite(total)
        }


class Devices(NamedTuple):
    """Devices of the learner, one per rank."""

    device: torch.device
    num: int

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type


def train_flops(shape: ModelShape, pieces: Sequence[Piece]) -> float:
    """Return the operations of one forward and backward pass over these pieces."""
    linear = 6 * (shape.num_active - shape.num_embedding) * sum(map(num_tokens, pieces))
    attention = 12 * shape.num_layers * shape.hidden_size * sum(map(num_pairs, pieces))
    return float(linear + attention)


def peak_tflops(device_name: str) -> float | None:
    """Return the device's peak TFLOPS, or None if unknown."""
    words = _words(device_name)
    for name, peak in PEAK_TFLOPS.items():
        if _words(name) <= words and words & VARIANTS == _words(name) & VARIANTS:
            return peak
    return None


def _words(device_name: str) -> set[str]:
    return set(re.split(r"[\s-]+", device_name.lower()))


def throughput(
    groups: Sequence[RolloutGroup], train_tflop: float | None, step_s: float, devices: Devices
) -> dict[str, float]:
    """Return tokens and TFLOPS per device, over the whole step including waits."""
    tokens = sum(
        len(group.prompt_of(branch)) + len(branch.token_ids) for group in groups for branch in group.completions
    )
    device_s = step_s * devices.num
    found = {"perf/tokens_per_s_per_device": tokens / device_s}
    if train_tflop is None:
        return found
    found["perf/tflops_per_device"] = train_tflop / device_s
    peak = peak_tflops(devices.name)
    return found if peak is None else found | {"perf/mfu": train_tflop / device_s / peak}
