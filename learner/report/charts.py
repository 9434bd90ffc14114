"""The charts of the report, the comparison and the dashboard, as data for charts.js.

    metrics, ledger, evaluations, plans.py ─▶ [Chart] ─▶ JSON in the page ─▶ charts.js draws with uPlot

Invariant: a chart without data is not drawn. The report names it, with the reason.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from learner.config.rewards import OF_THE_RUN
from learner.evaluation.results import Evaluation
from learner.report.plans import COLORS, PLANS, REST, TIME_PARTS, ChartPlan, Unit
from learner.report.series import Curve, Metrics, Series, extremes, make_series, rounded, series

MAX_MARKS = 60  # with more refreshes than this, only their number is shown
REWARD_OF_A_SET = re.compile(r"evaluation/(?!function/|pass_at_)([^/]+)/reward")


class Chart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chart, as charts.js reads it."""

    title: str
    caption: str
    """One sentence on how to read the chart."""
    series: list[Series]
    x: str
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


def run_charts(
    metrics: Metrics, evaluations: Chart | None, staleness_histogram: dict[int, int] | None = None
) -> list[Chart | Absent]:
    """Return every chart of one run, in reading order. None: the page has no such chart."""
    recorded = {"", *(name for line in metrics for name in line)}
    charts = {title: plan_chart(plan, metrics) for title, plan in PLANS.items() if plan.only_if in recorded}
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


def plan_chart(plan: ChartPlan, metrics: Metrics) -> Chart | Absent:
    return chart_of(plan, [(curve, metrics) for curve in plan.curves])


def chart_of(plan: ChartPlan, curves: Sequence[tuple[Curve, Metrics]]) -> Chart | Absent:
    """Return a chart of curves, each from the metrics of its run."""
    against = "elapsed_s" if plan.over_time else "step"
    found = [(curve, *series(metrics, curve.metric, against)) for curve, metrics in curves]
    if plan.log:
        found = [(curve, x[y > 0], y[y > 0]) for curve, x, y in found]
    found = [(curve, x, y) for curve, x, y in found if len(y)]
    if not found:
        names = sorted({curve.metric for curve, _ in curves})
        return Absent(plan.title, f"the run recorded no {' and no '.join(names)}")
    unit = "step"
    if plan.over_time:
        unit, scale = _time_unit(max(x[-1] for _, x, _ in found))
        found = [(curve, np.array(rounded(x / scale)), y) for curve, x, y in found]
    return Chart(
        title=plan.title,
        caption=plan.caption,
        series=[make_series(curve, x, y, plan.log) for curve, x, y in found],
        x=unit,
        unit=plan.unit,
        log=plan.log,
    )


# ---- charts that take more than their metrics
def reward_function_charts(metrics: Metrics) -> list[Chart | Absent]:
    """Return a chart of all reward functions if there are several; a single one is the mean reward."""
    recorded = {name.removeprefix("reward/") for line in metrics for name in line if name.startswith("reward/")}
    # exact_match has the color of the other charts, in which the first one is of the mean.
    names = sorted(recorded - OF_THE_RUN, key=lambda name: (name != "exact_match", name))
    if len(names) < 2:
        return []
    curves = [Curve(f"reward/{name}", name, color) for name, color in zip(names, COLORS[1:], strict=False)]
    more = f" The first {len(curves)} of {len(names)}." if len(names) > len(curves) else ""
    caption = f"Mean per step, before weighting; also values that functions log.{more}"
    return [plan_chart(ChartPlan("Each reward function", caption, curves), metrics)]


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
    return Chart(title="Evaluations", caption=f"Reward on {prompts}, with 95% intervals.", x="step", series=curves)


def evaluations_of_run(evaluations: Sequence[Evaluation]) -> Chart | None:
    """Return the chart of evaluations.jsonl, or None without any.

    It has one curve for each set of prompts, because only equal prompts can be compared.
    """
    if not evaluations:
        return None
    by_prompts: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        by_prompts.setdefault(evaluation.questions_digest, []).append(evaluation)
    sets = list(by_prompts.values())[-len(COLORS) :]
    curves = [_evaluated_curve(made, color) for made, color in zip(sets, COLORS, strict=False)]
    curves = [curve for curve in curves if curve.x]
    prompts = ", ".join(_prompts_of(made[-1]) for made in sets if made[-1].set_name or made is sets[-1])
    return evaluation_chart(curves, prompts) if curves else None


def _evaluated_curve(made: Sequence[Evaluation], color: str) -> Series:
    rewards = [(one.step, one.reward) for one in made if one.step is not None and one.reward is not None]
    return Series(
        name=made[-1].set_name or "reward",
        color=color,
        kind="points",
        x=[float(step) for step, _ in rewards],
        y=rounded(reward.mean for _, reward in rewards),
        low=rounded(reward.mean if reward.low is None else reward.low for _, reward in rewards),
        high=rounded(reward.mean if reward.high is None else reward.high for _, reward in rewards),
    )


def _prompts_of(evaluation: Evaluation) -> str:
    of_set = f"{evaluation.set_name}: " if evaluation.set_name else ""
    return f"{of_set}{evaluation.num_prompts:,} prompts of {evaluation.data}"


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
    count = f" ({len(refreshes)}×)" if len(metrics) == metrics[-1]["step"] else ""  # the dashboard has few of the steps
    curve = Curve("reference/kl", "KL", "blue")
    return Chart(
        title=title,
        caption="KL divergence of the policy from its reference.",
        x="step",
        # A mean across a refresh would blur the drop.
        series=[make_series(curve, steps, values, breaks=marks.tolist())],
        marks=marks.tolist(),
        notes=[f"reference refreshed{count}"] if len(refreshes) else [],
    )


def time_chart(metrics: Metrics) -> Chart | Absent:
    """Return the parts of a step, stacked to the length of the whole step."""
    title, parts = "Time per step", (*TIME_PARTS, REST)
    metrics = [{**line, REST.metric: _rest(line)} if line.get("time/step") is not None else line for line in metrics]
    present = [curve for curve in parts if len(series(metrics, curve.metric, "step")[1])]
    if not present:
        return Absent(title, "the run recorded no time/…")
    steps = np.array([float(line["step"]) for line in metrics])
    recorded = [[float(line.get(curve.metric) or 0.0) for line in metrics] for curve in present]
    seconds = [np.nan_to_num(values, posinf=0.0, neginf=0.0) for values in recorded]
    total = sum(float(values.mean()) for values in seconds) or 1.0
    areas = [
        msgspec.structs.replace(make_series(curve, steps, values), rest=f"{values.mean() / total:.0%}")
        for curve, values in zip(present, seconds, strict=True)
    ]
    caption = "Seconds of the learner per step, moving mean. Legend: shares of the whole run."
    return Chart(title=title, caption=caption, x="step", unit="seconds", series=areas)


def _rest(line: Mapping[str, float]) -> float:
    return max(0.0, line["time/step"] - sum(line.get(curve.metric) or 0.0 for curve in TIME_PARTS))


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds < 180:
        return "seconds", 1.0
    return ("minutes", 60.0) if seconds < 3 * 3600 else ("hours", 3600.0)
