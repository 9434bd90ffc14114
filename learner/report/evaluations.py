"""The evaluations of a run as a chart: the reward on fixed prompts over the steps, with its interval.

    evaluations.jsonl ─▶ summary.py ─▶ evaluation_chart ─▶ page.py

Invariant: one curve for each set of questions, because only equal questions can be compared.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from learner.evaluation.results import Evaluation
from learner.report.charts import Chart
from learner.report.drawing import COLOURS, canvas, label_ends, plain, room_for, set_limits, svg_of

REWARD_OF_A_SET = re.compile(r"evaluation/(?!function/|pass_at_)([^/]+)/reward")


def rewards_of_sets(metrics: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """Map the name of each evaluation set to the metric of its reward."""
    names = {name for line in metrics for name in line if name.startswith("evaluation/")}
    return {found[1]: found[0] for name in sorted(names) if (found := REWARD_OF_A_SET.fullmatch(name))}


def evaluation_chart(evaluations: Sequence[Evaluation]) -> Chart | None:
    """Draw the evaluations, or return None without any."""
    if not evaluations:
        return None
    by_questions: dict[str, list[Evaluation]] = {}
    for one in evaluations:
        by_questions.setdefault(one.asked, []).append(one)
    sets = list(by_questions.values())[-len(COLOURS) :]
    ends = [
        (made[-1].reward.mean, f"{made[-1].set_name or ''} {plain(made[-1].reward.mean)}".strip(), colour)
        for made, colour in zip(sets, COLOURS, strict=False)
        if made[-1].reward
    ]
    figure, axes = canvas(right_in=room_for(text for _, text, _ in ends))
    heights = []
    for made, colour in zip(sets, COLOURS, strict=False):
        steps, table = np.array([one.step for one in made]), _table(made)
        axes.fill_between(steps, table[:, 1], table[:, 2], color=colour, alpha=0.16, linewidth=0)
        axes.plot(steps, table[:, 0], "o-", color=colour, markersize=4, markeredgewidth=0, linewidth=1.9)
        heights.append(table.ravel())
    set_limits(axes, heights, plain, False)
    axes.set_xlabel("step")
    label_ends(axes, ends)
    asked = ", ".join(_prompts_of(made[-1]) for made in sets if made[-1].set_name or made is sets[-1])
    told = f"Reward on {asked}; shaded: 95 % intervals."
    title = "Evaluations"
    return Chart(title=title, told=told, svg=svg_of(figure, title))


def _prompts_of(one: Evaluation) -> str:
    of_set = f"{one.set_name}: " if one.set_name else ""
    return f"{of_set}{one.num_prompts:,} prompts of {one.data}"


def _table(made: Sequence[Evaluation]) -> np.ndarray:
    """Return rows of (mean, low, high). Without an interval, all three are the mean."""
    rows = []
    for one in made:
        reward = one.reward
        assert reward is not None
        low, high = (reward.mean if end is None else end for end in (reward.low, reward.high))
        rows.append((reward.mean, low, high))
    return np.array(rows)
