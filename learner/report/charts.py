"""The charts of the report, the comparison and the dashboard, as data for charts.js.

    metrics, ledger, evaluations ─▶ [Chart] ─▶ JSON in the page ─▶ charts.js draws with uPlot

Invariant: a chart without data is not drawn. The report names it, with the reason.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from learner.report.series import Curve, Metrics, Series, extremes, make_series, rounded, series

COLORS = (
    "blue", "amber", "teal", "violet", "rose", "grey", "green", "red", "cyan", "olive", "brown", "indigo",
)  # fmt: skip
"""CSS variables of the colors of curves of the same kind, in order."""
MAX_MARKS = 60  # with more refreshes than this, only their number is shown
REWARD_OF_A_SET = re.compile(r"evaluation/(?!function/|pass_at_)([^/]+)/reward")
Unit = Literal["number", "percent", "seconds"]


class Chart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chart, as charts.js reads it."""

    title: str
    caption: str
    """One sentence on how to read the chart."""
    series: list[Series]
    x: str = "step"
    """Unit of x. The cursors of all charts with the same unit move together."""
    unit: Unit = "number"
    """Format of the values."""
    log: bool = False
    marks: list[float] = []
    """Vertical lines at these x."""
    notes: list[str] = []
    """Texts below the chart."""


class Absent(msgspec.Struct, frozen=True):
    """A chart that has no data, and the reason."""

    title: str
    reason: str


class Plan(msgspec.Struct, frozen=True):
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
        Plan("Reward per step", "Mean over the groups of a step.", REWARD),
        Plan("Reward over time", "Mean over the groups of a step, against the clock.", REWARD, over_time=True),
        Plan(
            "Staleness per step",
            "Policy versions between sampling and training.",
            [Curve("staleness/mean", "mean", "blue"), Curve("staleness/max", "max", "grey")],
        ),
        Plan("Entropy", "Near 0 the policy no longer explores.", [Curve("policy/entropy", "entropy", "blue")]),
        Plan(
            "Clipped tokens",
            "Share of tokens whose ratio left the trusted range.",
            [Curve("loss/clipped_frac", "clipped", "blue")],
            "percent",
        ),
        Plan("Gradient norm", "Before clipping.", [Curve("optim/grad_norm", "norm", "blue")]),
        Plan(
            "Completion length",
            "Tokens per completion.",
            [
                Curve("rollout/completion_length_mean", "mean", "blue"),
                Curve("rollout/completion_length_max", "longest", "grey"),
            ],
        ),
        Plan(
            "Truncated completions",
            "Share of completions that ended at learner.sampling.max_tokens.",
            [Curve("rollout/truncated_frac", "truncated", "blue")],
            "percent",
        ),
        Plan("Reward deviation", "Standard deviation within a step.", [Curve("reward/std", "deviation", "blue")]),
        Plan("Loss", "Loss that the optimizer minimizes.", [Curve("loss/policy", "loss", "blue")]),
        Plan("Learning rate", "Learning rate of each step.", [Curve("optim/lr", "rate", "blue")]),
        Plan(
            "Throughput",
            "Completion tokens trained on per second.",
            [Curve("perf/completion_tokens_per_s", "tokens/s", "blue")],
        ),
        Plan(
            "Idle time",
            "Share of the time in which each side had nothing to do.",
            [Curve("perf/learner_idle_frac", "learner", "blue"), Curve("perf/server_idle_frac", "server", "amber")],
            "percent",
        ),
        Plan(
            "Weight sync time",
            "The whole transfer, and how long it stopped generation.",
            [Curve("push/stall_seconds", "stall", "blue"), Curve("push/seconds", "transfer", "grey")],
            "seconds",
        ),
        Plan(
            "Mismatch of server and learner",
            "Mean |Δ logprob| under the same weights, in training and in parity probes.",
            [
                Curve("policy/mismatch_abs_logprob", "fresh tokens", "blue"),
                Curve("parity/abs_logprob", "probe", "amber", "points"),
            ],
            log=True,
        ),
        Plan(
            "Turns per episode",
            "Mean over the episodes of a step.",
            [Curve(EPISODES, "turns", "blue"), Curve("episode/branches_mean", "branches", "grey")],
            only_if=EPISODES,
        ),
        Plan(
            "Tokens by speaker",
            "Tokens of a step, from the policy and from the environment.",
            [Curve("rollout/tokens", "policy", "blue"), Curve("episode/environment_tokens", "environment", "amber")],
            only_if=EPISODES,
        ),
        Plan(
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
    Curve("time/push", "weight sync", "teal", "area"),
)
REST = Curve("time/rest", "batches, parity, other", "grey", "area")
"""Time that no named part of a step covers."""


def run_charts(
    metrics: Metrics, evaluations: Chart | None, staleness_histogram: dict[int, int] | None = None
) -> list[Chart | Absent]:
    """Return every chart of one run, in reading order. None: the page has no such chart."""
    charts = {title: plan_chart(plan, metrics) for title, plan in PLANS.items() if _applies(plan, metrics)}
    return [
        charts.pop("Reward per step"),
        *([evaluations] if evaluations else []),
        charts.pop("Reward over time"),
        *reward_function_charts(metrics),
        *([] if staleness_histogram is None else [staleness_chart(staleness_histogram)]),
        charts.pop("Staleness per step"),
        kl_chart(metrics),
        time_chart(metrics),
        *charts.values(),
    ]


def plan_chart(plan: Plan, metrics: Metrics) -> Chart | Absent:
    return chart_of(plan, [(curve, metrics) for curve in plan.curves])


def chart_of(plan: Plan, curves: Sequence[tuple[Curve, Metrics]]) -> Chart | Absent:
    """Return a chart of curves, each from the metrics of its run."""
    against = "elapsed_s" if plan.over_time else "step"
    found = [(curve, *series(metrics, curve.metric, against)) for curve, metrics in curves]
    if plan.log:
        found = [(curve, x[y > 0], y[y > 0]) for curve, x, y in found]
    found = [(curve, x, y) for curve, x, y in found if len(y)]
    if not found:
        names = sorted({curve.metric for curve, _ in curves})
        return Absent(plan.title, f"the run recorded no {' and no '.join(names)}")
    unit, scale = _time_unit(max(x[-1] for _, x, _ in found)) if plan.over_time else ("step", 1.0)
    return Chart(
        title=plan.title,
        caption=plan.caption,
        series=[make_series(curve, x / scale, y, plan.log) for curve, x, y in found],
        x=unit,
        unit=plan.unit,
        log=plan.log,
    )


# ---- charts that take more than their metrics
def reward_function_charts(metrics: Metrics) -> list[Chart | Absent]:
    """Return a chart of all reward functions if there are several; a single one is the mean reward."""
    names = sorted({name for line in metrics for name in line if name.startswith("reward/")})
    names = [name for name in names if name not in ("reward/mean", "reward/std", "reward/exact_match")]
    if len(names) < 2:
        return []
    curves = [Curve(name, name.removeprefix("reward/"), color) for name, color in zip(names, COLORS, strict=False)]
    more = f" The first {len(curves)} of {len(names)}." if len(names) > len(curves) else ""
    return [plan_chart(Plan("Each reward function", f"Mean per step, before weighting.{more}", curves), metrics)]


def evaluations_of_metrics(metrics: Metrics) -> Chart | None:
    """Return the chart of the evaluations that the metrics repeat, with a curve for each set."""
    of_sets = rewards_of_sets(metrics) or {"reward": "evaluation/reward"}
    curves = []
    for (name, metric), color in zip(of_sets.items(), COLORS, strict=False):
        x, y = series(metrics, metric, "step")
        curve = make_series(Curve(metric, name, color, "points"), x, y)
        ends = [series(metrics, f"{metric}/{end}", "step") for end in ("low", "high")]
        if all(np.array_equal(x, steps) for steps, _ in ends):
            kept = extremes(y)
            low, high = (rounded(values[kept]) for _, values in ends)
            curve = msgspec.structs.replace(curve, low=low, high=high)
        curves += [curve] if len(y) else []
    return evaluation_chart(curves, "the prompts of learner.evaluation") if curves else None


def evaluation_chart(curves: list[Series], prompts: str) -> Chart:
    return Chart(title="Evaluations", caption=f"Reward on {prompts}, with 95 % intervals.", series=curves)


def rewards_of_sets(metrics: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """Map the name of each evaluation set to the metric of its reward."""
    names = {name for line in metrics for name in line if name.startswith("evaluation/")}
    return {found[1]: found[0] for name in sorted(names) if (found := REWARD_OF_A_SET.fullmatch(name))}


def staleness_chart(histogram: dict[int, int]) -> Chart | Absent:
    title = "Staleness of consumed groups"
    if not histogram:
        return Absent(title, "no group has been consumed yet")
    ages = list(range(min(0, *histogram), max(histogram) + 1))
    counts, total = [float(histogram.get(age, 0)) for age in ages], sum(histogram.values())
    shares = [f"{age}: {count / total:.1%}" for age, count in zip(ages, counts, strict=True)]
    bars = Series(name="groups", color="blue", kind="bars", x=[float(age) for age in ages], y=counts, rest=f"{total:,}")
    return Chart(
        title=title,
        caption="Groups by staleness when the learner trained on them. Synchronous training would have only 0.",
        x="policy versions behind",
        series=[bars],
        notes=shares if len(ages) <= 12 else [],
    )


def kl_chart(metrics: Metrics) -> Chart | Absent:
    title = "KL to the reference"
    steps, values = series(metrics, "reference/kl", "step")
    if not len(values):
        return Absent(
            title, "the run recorded no reference/kl (learner.reference may be none, or the KL coefficient 0)"
        )
    version_steps, versions = series(metrics, "reference/version", "step")
    refreshes = version_steps[1:][np.diff(versions) != 0]
    marks = refreshes if len(refreshes) <= MAX_MARKS else refreshes[:0]
    curve = Curve("reference/kl", "KL", "blue")
    return Chart(
        title=title,
        caption="KL divergence of the policy from its reference.",
        series=[
            make_series(curve, steps, values, breaks=marks.tolist())
        ],  # a mean across a refresh would blur the drop
        marks=marks.tolist(),
        notes=[f"reference refreshed ({len(refreshes)}×)"] if len(refreshes) else [],
    )


def time_chart(metrics: Metrics) -> Chart | Absent:
    """Return the parts of a step, stacked to the length of the whole step."""
    title, parts = "Time per step", (*TIME_PARTS, REST)
    metrics = [{**line, REST.metric: _rest(line)} if line.get("time/step") is not None else line for line in metrics]
    present = [curve for curve in parts if len(series(metrics, curve.metric, "step")[1])]
    if not present:
        return Absent(title, "the run recorded no time/…")
    steps = np.array([float(line["step"]) for line in metrics])
    seconds = [np.nan_to_num([float(line.get(curve.metric) or 0.0) for line in metrics]) for curve in present]
    total = sum(float(values.mean()) for values in seconds) or 1.0
    areas = [
        msgspec.structs.replace(make_series(curve, steps, values), rest=f"{values.mean() / total:.0%}")
        for curve, values in zip(present, seconds, strict=True)
    ]
    caption = "Seconds of the learner per step, moving mean. Legend: shares of the whole run."
    return Chart(title=title, caption=caption, unit="seconds", series=areas)


def _rest(line: Mapping[str, float]) -> float:
    return max(0.0, line["time/step"] - sum(line.get(curve.metric) or 0.0 for curve in TIME_PARTS))


def _applies(plan: Plan, metrics: Metrics) -> bool:
    return not plan.only_if or any(plan.only_if in line for line in metrics)


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)
