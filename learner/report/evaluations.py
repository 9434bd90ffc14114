"""The evaluations of a run as a chart: the reward on fixed prompts over the steps, with its interval.

    evaluations.jsonl ─▶ summary.py ─▶ evaluations_of_run ─▶ page.py

Invariant: one curve for each set of prompts, because only equal prompts can be compared.
"""

from collections.abc import Sequence

from learner.evaluation.results import Evaluation
from learner.report.charts import COLORS, Chart, evaluation_chart
from learner.report.series import Series, rounded


def evaluations_of_run(evaluations: Sequence[Evaluation]) -> Chart | None:
    """Return the chart of the evaluations, or None without any."""
    if not evaluations:
        return None
    by_prompts: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        by_prompts.setdefault(evaluation.asked, []).append(evaluation)
    sets = list(by_prompts.values())[-len(COLORS) :]
    curves = [_curve(made, color) for made, color in zip(sets, COLORS, strict=False)]
    prompts = ", ".join(_prompts_of(made[-1]) for made in sets if made[-1].set_name or made is sets[-1])
    return evaluation_chart(curves, prompts)


def _curve(made: Sequence[Evaluation], color: str) -> Series:
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
