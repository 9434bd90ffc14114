"""The audit of evaluations, from evaluations.jsonl and the answers on disk. It shares no code with learner/evaluation.

evaluations.jsonl ─▶ one line for each due step and set, of the step's final weights (ledger.db has the time)
answered/         ─▶ one answer to every prompt of each line
answers.py: the answer is greedy under the weights that it names, and has the correct reward
"""

import json
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from learner.config import LearnerRun

ANSWERED = "answered"
SKIPPED = re.compile(r"skipping the evaluation after step (\d+) \(that of step \d+ still running\)")
Line = dict[str, Any]
Check = Callable[[Line, Sequence[Line]], list[str]]
"""Returns the problems of a line, given the answers to its prompts."""


class EvaluationsFound(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to the evaluations of a run."""

    due: int
    """Number of steps with a due evaluation."""
    recorded: int
    skipped: int
    """Steps that the log says were skipped because an evaluation was still running. A run that pins skips none."""
    wrong: list[str]
    """Descriptions of the problems."""


def audit_evaluations(directory: Path, config: LearnerRun, num_steps: int, check: Check) -> EvaluationsFound:
    evaluation = config.learner.evaluation
    run_dir = directory / "run"
    sizes = {name: each.num_prompts or 0 for name, each in evaluation.sets.items()}
    due = {
        *range(0 if evaluation.at_start else evaluation.every_steps, num_steps + 1, evaluation.every_steps),
        num_steps,
    }
    log = (directory / "learner.log").read_text(errors="replace")
    skipped = set() if evaluation.pin_policy else {int(step) for step in SKIPPED.findall(log)}
    recorded = run_dir / "evaluations.jsonl"
    lines = [json.loads(line) for line in recorded.read_text().splitlines()] if recorded.exists() else []
    trained_at = _trained_at(run_dir / "ledger.db")
    kept, wrong = _final_lines(lines, trained_at)
    expected = {(step, name) for step in due for name in sizes}
    wrong += [f"{_name(*key)} is missing" for key in sorted(expected - kept.keys()) if key[0] not in skipped]
    wrong += [f"{_name(*key)} was not due" for key in sorted(kept.keys() - expected)]
    for name in sizes:
        wrong += _wrong_differences([kept[key] for key in sorted(kept) if key[1] == name])
    answers = _answers(directory / ANSWERED)
    for step in sorted({step for step, _ in kept}):
        first, of_step = 0, answers.get(step, [])
        counts = Counter(place for place, _ in of_step)
        wrong += [
            f"the evaluation after step {step} has {counts[place]} answers to prompt {place}"
            for place in range(sum(sizes.values()))
            if counts[place] != 1
        ]
        by_place = dict(of_step)
        for name, size in sizes.items():
            if (line := kept.get((step, name))) is not None:
                own = [by_place[place] for place in range(first, first + size) if place in by_place]
                wrong += [
                    f"{_name(step, name)} {problem}" for problem in _problems(line, own, size, evaluation.pin_policy)
                ]
                wrong += [f"{_name(step, name)} {problem}" for problem in check(line, own)]
            first += size
    return EvaluationsFound(
        due=len(due), recorded=len({step for step, _ in kept}), skipped=len(due & skipped - {step for step, _ in kept}),
        wrong=wrong,
    )  # fmt: skip


def _final_lines(
    lines: Sequence[Line], trained_at: Mapping[int, float]
) -> tuple[dict[tuple[int, str], Line], list[str]]:
    """Return the last line of each step and set, and the problems. Only a step trained again may have several."""
    kept: dict[tuple[int, str], Line] = {}
    wrong = []
    for line in lines:
        step, name = line["step"], line["set_name"]
        replaced = [key for key in kept if key[0] > step or key == (step, name)]
        for key in replaced:
            if kept.pop(key)["time"] > trained_at.get(key[0], 0.0):
                wrong.append(f"{_name(*key)} was recorded twice")
        kept[step, name] = line
    wrong += [
        f"{_name(*key)} is of weights that were trained again"
        for key, line in kept.items()
        if line["time"] < trained_at.get(key[0], 0.0)
    ]
    return kept, wrong


def _trained_at(ledger: Path) -> dict[int, float]:
    """Return the time at which each step last consumed its groups."""
    with sqlite3.connect(f"file:{ledger}?mode=ro", uri=True) as db:
        return dict(db.execute("SELECT step, max(consumed_at) FROM groups WHERE state = 'consumed' GROUP BY step"))


def _wrong_differences(lines: Sequence[Line]) -> list[str]:
    """Check the differences between the lines of one set, in the order of the steps."""
    wrong, before = [], None
    for line in lines:
        recorded = None if line["difference"] is None else line["difference"]["mean"]
        if before is not None and None not in line["rewards_P"] + before["rewards_P"]:
            expected = float(np.mean(line["rewards_P"]) - np.mean(before["rewards_P"]))
            if recorded is None or abs(recorded - expected) > 1e-9:
                wrong.append(
                    f"{_name(line['step'], line['set_name'])} records the difference {recorded}, not {expected:.4f}"
                )
        before = line
    return wrong


def _answers(directory: Path) -> dict[int, list[tuple[int, Line]]]:
    """Return the answers of the newest evaluation of each step, with the numbers of their prompts."""
    newest = {}
    for path in sorted(directory.glob("*")):
        first, *lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        newest[first["step"]] = [(line["place"], line["answered"]) for line in lines]
    return newest


def _problems(line: Line, answers: Sequence[Line], size: int, is_pinned: bool) -> list[str]:
    rewards, found = line["rewards_P"], []
    if not line["num_prompts"] == len(rewards) == size or None in rewards:
        found.append(
            f"counts {line['num_prompts']} prompts with {rewards.count(None)} missing rewards, not {size} prompts"
        )
    elif abs(float(np.mean(rewards)) - line["reward"]["mean"]) > 1e-9:
        found.append(f"records the mean {line['reward']['mean']} of rewards whose mean is {np.mean(rewards)}")
    versions = [each["versions"] for each in answers]
    if versions and [min(low for low, _ in versions), max(high for _, high in versions)] != line["versions"]:
        found.append(f"records versions {line['versions']} of answers by {versions}")
    if is_pinned and line["versions"] != [line["step"]] * 2:
        found.append(f"is pinned, but was answered by versions {line['versions']}")
    return found


def _name(step: int, set_name: str) -> str:
    return f"the evaluation of {set_name} after step {step}"
