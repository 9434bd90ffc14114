"""The optimizer steps of a run, and the arithmetic of the comparisons. Pure.

    metrics.jsonl, or TRL's logs ─▶ Step ─▶ seconds, shares and ratios

Invariant: both sides are measured by the same functions over the same steps, without the first `warm_up` steps.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from tests.bench.workload import Workload

SMOOTH_OVER_STEPS = 3


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step. Seconds count from the start of the first step."""

    ended_s: float
    version: float
    """Version of the policy that sampled the batch; the mean if groups differ."""
    completion_length_mean: float
    reward_mean: float
    wait_s: float = 0.0
    """The trainer's wait for the batch."""
    lengths: list[int] = []
    """Tokens of each completion, where they were recorded."""
    mismatch: float | None = None
    """Mean |Δ logprob| between sampler and trainer, where it was measured."""


def own_step(line: dict[str, Any]) -> Step:
    """Return a step from a line of metrics.jsonl."""
    return Step(
        ended_s=line["elapsed_s"],
        version=line["step"] - 1 - line["staleness/mean"],
        completion_length_mean=line["rollout/completion_length_mean"],
        reward_mean=line["reward/mean"],
        wait_s=line["time/wait_for_batch"],
    )


def seconds_per_step(steps: Sequence[Step], warm_up: int) -> float:
    """Return the mean over all steps except the first `warm_up`, at least one."""
    return (steps[-1].ended_s - steps[warm_up - 1].ended_s) / (len(steps) - warm_up)


def idle_frac(steps: Sequence[Step], warm_up: int) -> float:
    """Return the share of the time in which the trainer waited for its batch."""
    waited_s = statistics.fmean(step.wait_s for step in steps[warm_up:])
    return waited_s / seconds_per_step(steps, warm_up)


def length_mean(steps: Sequence[Step], warm_up: int) -> float:
    """Return the mean number of tokens of a completion."""
    return statistics.fmean(step.completion_length_mean for step in steps[warm_up:])


def limit_frac(
    workload: Workload, steps: Sequence[Step], warm_up: int, num_parameters: int, flops_per_s: float
) -> float:
    """Return the share of a step's time that 6 operations per parameter and token take at the measured rate."""
    needed = workload.needed_tokens(length_mean(steps, warm_up)) * 6 * num_parameters
    return needed / flops_per_s / seconds_per_step(steps, warm_up)


def reward_at(steps: Sequence[Step], versions: Sequence[float]) -> float:
    """Return the mean reward at these versions, interpolated between the recorded versions."""
    seen = [step.version for step in steps]
    return float(np.mean(np.interp(versions, seen, [step.reward_mean for step in steps])))


def seconds_to_reward(steps: Sequence[Step], target: float) -> float | None:
    """Return when the policy existed whose smoothed reward reaches `target`; None: never."""
    made_s = np.interp(
        [step.version for step in steps], np.arange(len(steps) + 1), [0.0, *(step.ended_s for step in steps)]
    )
    times, rewards = smoothed(made_s.tolist()), smoothed([step.reward_mean for step in steps])
    for i, reward in enumerate(rewards):
        if reward >= target:
            if i == 0:
                return times[0]
            share = (target - rewards[i - 1]) / (reward - rewards[i - 1])
            return times[i - 1] + share * (times[i] - times[i - 1])
    return None


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the means of neighboring values."""
    return np.convolve(values, np.full(SMOOTH_OVER_STEPS, 1 / SMOOTH_OVER_STEPS), mode="valid").tolist()


def predicted_idle(generation_s: float, training_s: float) -> dict[str, float]:
    """Return the idleness of each side from its seconds per step alone: the faster side waits for the slower."""
    slower_s = max(generation_s, training_s)
    return {"server": 1 - generation_s / slower_s, "learner": 1 - training_s / slower_s}
