"""Titles, captions and metrics of the charts, in reading order."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from learner.report.series import Curve

COLORS = (
    "blue", "amber", "teal", "violet", "rose", "grey", "green", "red", "cyan", "olive", "brown", "indigo",
)  # fmt: skip
"""CSS variables of the colors of curves of the same kind, in order."""
Unit = Literal["number", "percent", "seconds"]


class ChartPlan(msgspec.Struct, frozen=True):
    """A chart of metrics, for any run."""

    title: str
    caption: str
    curves: Sequence[Curve]
    unit: Unit = "number"
    over_time: bool = False
    """Whether x is time instead of steps."""
    log: bool = False
    only_if: str = ""
    """Metric without which the chart does not apply to the run."""


REWARD = (Curve("reward/mean", "mean", "blue"), Curve("reward/exact_match", "exact match", "amber"))
EPISODES = "episode/turns_mean"
PLANS = {
    plan.title: plan
    for plan in (
        ChartPlan("Reward per step", "Mean over the groups of a step.", REWARD),
        ChartPlan("Reward over time", "Mean over the groups of a step, against the clock.", REWARD, over_time=True),
        ChartPlan(
            "Staleness per step",
            "Policy versions between sampling and training.",
            [Curve("staleness/mean", "mean", "blue"), Curve("staleness/max", "max", "grey")],
        ),
        ChartPlan(
            "Entropy",
            "Mean over the tokens in the loss. Near 0 the policy no longer explores.",
            [Curve("policy/entropy", "entropy", "blue")],
        ),
        ChartPlan(
            "Clipped tokens",
            "Share of the tokens in the loss whose ratio left the trusted range.",
            [Curve("loss/clipped_frac", "clipped", "blue")],
            "percent",
        ),
        ChartPlan("Gradient norm", "Before clipping.", [Curve("optim/grad_norm", "norm", "blue")]),
        ChartPlan(
            "Completion length",
            "Tokens per completion.",
            [
                Curve("rollout/completion_length_mean", "mean", "blue"),
                Curve("rollout/completion_length_max", "longest", "grey"),
            ],
        ),
        ChartPlan(
            "Truncated completions",
            "Share of completions that ended at learner.sampling.max_tokens.",
            [Curve("rollout/truncated_frac", "truncated", "blue")],
            "percent",
        ),
        ChartPlan("Reward deviation", "Standard deviation within a step.", [Curve("reward/std", "deviation", "blue")]),
        ChartPlan(
            "Loss",
            "The weighted objective, without the terms of KL and entropy.",
            [Curve("loss/policy", "loss", "blue")],
        ),
        ChartPlan("Learning rate", "Learning rate of each step.", [Curve("optim/lr", "rate", "blue")]),
        ChartPlan(
            "Throughput",
            "Completion tokens of all groups per second.",
            [Curve("perf/completion_tokens_per_s", "tokens per second", "blue")],
        ),
        ChartPlan(
            "Idle time",
            "Share of the time in which each side had nothing to do.",
            [Curve("perf/learner_idle_frac", "learner", "blue"), Curve("perf/server_idle_frac", "server", "amber")],
            "percent",
        ),
        ChartPlan(
            "Weight sync time",
            "The whole transfer, and how long it stopped generation.",
            [Curve("weight_sync/stall_seconds", "stall", "blue"), Curve("weight_sync/seconds", "transfer", "grey")],
            "seconds",
        ),
        ChartPlan(
            "Mismatch of server and learner",
            "Mean |Δ logprob| under the same weights, in training and in parity probes.",
            [
                Curve("policy/mismatch_abs_logprob", "fresh tokens", "blue"),
                Curve("parity/abs_logprob", "probe", "amber", "points"),
            ],
            log=True,
        ),
        ChartPlan(
            "Turns per episode",
            "Mean over the episodes of a step.",
            [Curve(EPISODES, "turns", "blue"), Curve("episode/branches_mean", "branches", "grey")],
            only_if=EPISODES,
        ),
        ChartPlan(
            "Tokens by speaker",
            "Tokens of a step, from the policy and from the environment.",
            [Curve("rollout/tokens", "policy", "blue"), Curve("episode/environment_tokens", "environment", "amber")],
            only_if=EPISODES,
        ),
        ChartPlan(
            "Tool calls",
            "Calls in a step. A failed call was answered with an error.",
            [Curve("episode/tool_calls", "calls", "blue"), Curve("episode/failed_calls", "failed", "rose")],
            only_if=EPISODES,
        ),
    )
}
TIME_PARTS = (
    Curve("time/wait_for_batch", "waiting for groups", "amber", "area"),
    Curve("time/reference", "reference", "rose", "area"),
    Curve("time/forward_backward", "forward and backward", "blue", "area"),
    Curve("time/optimizer", "optimizer", "violet", "area"),
    Curve("time/weight_sync", "weight sync", "teal", "area"),
    Curve("time/checkpoint", "checkpoint", "green", "area"),
)
REST = Curve("time/rest", "batches, parity, other", "grey", "area")
"""Time that no named part of a step covers."""
