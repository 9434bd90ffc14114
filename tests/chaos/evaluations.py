"""The audit of evaluations, from the lines of evaluations.jsonl and the answers as they lay on disk; it shares no code with
learner/evaluation.

    evaluations.jsonl ─▶ one line for each due step and set, of the weights that the step left in the end (ledger.db says when)
    answered/         ─▶ behind each line one answer to every prompt
                         answers.py: it is what the weights say that it names, and is rated by what it is worth
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
LEFT_OUT = re.compile(r"skipping the evaluation after step (\d+) \(that of step \d+ still running\)")
Line = dict[str, Any]
Check = Callable[[Line, Sequence[Line]], list[str]]
"""What is wrong with a line, in view of the answers to its prompts."""


class EvaluationsFound(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the evaluations of a run."""

    due: int
    """Steps after which there was to be one."""
    noted: int
    left_out: int
    """Steps that came while the evaluation before was under way, as the log says; never of a run that pins."""
    wrong: list[str]
    """In words."""


def audit_evaluations(directory: Path, config: LearnerRun, num_steps: int, check: Check) -> EvaluationsFound:
    evaluation = config.learner.evaluation
    run_dir = directory / "run"
    sizes = {name: each.num_prompts or 0 for name, each in evaluation.sets.items()}
    due = {
        *range(0 if evaluation.at_start else evaluation.every_steps, num_steps + 1, evaluation.every_steps),
        num_steps,
    }
    log = (directory / "learner.log").read_text(errors="replace")
    left_out = set() if evaluation.pin_policy else {int(step) for step in LEFT_OUT.findall(log)}
    noted = run_dir / "evaluations.jsonl"
    lines = [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []
    trained_at = _trained_at(run_dir / "ledger.db")
    kept, wrong = _in_the_end(lines, trained_at)
    owed = {(step, name) for step in due for name in sizes}
    wrong += [f"{_name(*key)} is not there" for key in sorted(owed - kept.keys()) if key[0] not in left_out]
    wrong += [f"{_name(*key)} was not due" for key in sorted(kept.keys() - owed)]
    for name in sizes:
        wrong += _wrong_differences([kept[key] for key in sorted(kept) if key[1] == name])
    answers = _answers(directory / ANSWERED)
    for step in sorted({step for step, _ in kept}):
        first, of_step = 0, answers.get(step, [])
        counts = Counter(place for place, _ in of_step)
        wrong += [
            f"the evaluation after step {step} has {counts[place]} answers to its prompt {place}"
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
        due=len(due), noted=len({step for step, _ in kept}), left_out=len(due & left_out - {step for step, _ in kept}),
        wrong=wrong,
    )  # fmt: skip


def _in_the_end(
    lines: Sequence[Line], trained_at: Mapping[int, float]
) -> tuple[dict[tuple[int, str], Line], list[str]]:
    """Return the line of each step and set that stays: another may stand before it only if the step was trained again since."""
    kept: dict[tuple[int, str], Line] = {}
    wrong = []
    for line in lines:
        step, name = line["step"], line["set_name"]
        gone = [key for key in kept if key[0] > step or key == (step, name)]
        for key in gone:
            if kept.pop(key)["time"] > trained_at.get(key[0], 0.0):
                wrong.append(f"{_name(*key)} was noted twice")
        kept[step, name] = line
    wrong += [
        f"{_name(*key)} is of weights that were trained anew"
        for key, line in kept.items()
        if line["time"] < trained_at.get(key[0], 0.0)
    ]
    return kept, wrong


def _trained_at(ledger: Path) -> dict[int, float]:
    """Step → when its groups were consumed for the last time."""
    with sqlite3.connect(f"file:{ledger}?mode=ro", uri=True) as db:
        return dict(db.execute("SELECT step, max(consumed_at) FROM groups WHERE state = 'consumed' GROUP BY step"))


def _wrong_differences(lines: Sequence[Line]) -> list[str]:
    """Of one set, in the order of the steps: what each says to be more than the one before."""
    wrong, before = [], None
    for line in lines:
        told = None if line["difference"] is None else line["difference"]["mean"]
        if before is not None and None not in line["rewards_P"] + before["rewards_P"]:
            meant = float(np.mean(line["rewards_P"]) - np.mean(before["rewards_P"]))
            if told is None or abs(told - meant) > 1e-9:
                wrong.append(
                    f"{_name(line['step'], line['set_name'])} is {told} more than the one before, not {meant:.4f}"
                )
        before = line
    return wrong


def _answers(directory: Path) -> dict[int, list[tuple[int, Line]]]:
    """Step → the answers of its newest evaluation, each with the number of its prompt."""
    newest = {}
    for path in sorted(directory.glob("*")):
        first, *lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        newest[first["step"]] = [(line["place"], line["answered"]) for line in lines]
    return newest


def _problems(line: Line, answers: Sequence[Line], size: int, is_pinned: bool) -> list[str]:
    rewards, found = line["rewards_P"], []
    if not line["num_prompts"] == len(rewards) == size or None in rewards:
        found.append(f"counts {line['num_prompts']} prompts, of which {rewards.count(None)} are not rated; not {size}")
    elif abs(float(np.mean(rewards)) - line["reward"]["mean"]) > 1e-9:
        found.append(f"says {line['reward']['mean']} where the prompts' rewards have the mean {np.mean(rewards)}")
    versions = [each["versions"] for each in answers]
    if versions and [min(low for low, _ in versions), max(high for _, high in versions)] != line["versions"]:
        found.append(f"says versions {line['versions']} of answers by {versions}")
    if is_pinned and line["versions"] != [line["step"]] * 2:
        found.append(f"is pinned, and was answered by versions {line['versions']}")
    return found


def _name(step: int, set_name: str) -> str:
    return f"the evaluation of {set_name} after step {step}"
