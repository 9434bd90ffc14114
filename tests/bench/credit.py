"""Measure how soon each credit learns the recipes with turns: `python -m tests.bench.credit --help`.

    recipe × credit × seed ─▶ slipstream colocate, until the mean reward is TARGET ─▶ DIR/credit.jsonl, a line per run
                                                                                  ─▶ table of steps to TARGET

The recipes' environments are the variants with a reward by turn. The reward of an episode is that of the recipe, so all
credits have the same goal. A restart with the same --out runs only the missing runs.
"""

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tomllib
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from learner.config import LearnerRun
from protocol.config import load_config
from protocol.errors import SlipstreamError
from tests.bench.colocated import ROOT, read_metrics, run_colocated
from tests.bench.machine import machine

RECIPES = ("guess", "calculator")
CREDITS = ("episode", "turn", "gigpo")
WINDOW = 10
"""Number of steps whose mean reward must reach the target."""


class Cell(NamedTuple):
    """One run."""

    recipe: str
    seed: int
    credit: str

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.credit}-{self.seed}"


def main() -> None:
    options = parse_options(sys.argv[1:])
    # Seed by seed, so that a stopped benchmark has compared all credits.
    cells = [Cell(*of) for of in itertools.product(options.recipes, options.seeds, CREDITS)]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        run_missing(cells, options.out, options.target)
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    print(as_text([line for line in finished(options.out) if cell_of(line) in cells]))


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.credit", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-credit"), help="directory of runs and results")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--target", type=float, default=0.9, help=f"mean reward of {WINDOW} steps that ends a run")
    return parser.parse_args(arguments)


def run_missing(cells: Sequence[Cell], directory: Path, target: float) -> None:
    """Run the cells without a result, and append the results."""
    done = {cell_of(line) for line in finished(directory)}
    for cell in cells:
        if cell in done:
            continue
        run_dir = (directory / cell.name).resolve()
        shutil.rmtree(run_dir, ignore_errors=True)  # of a benchmark that was stopped
        run = config_of(cell, run_dir)
        is_there = partial(has_reached, run_dir, target)
        run_colocated(run, recipe_of(cell)["server"], is_done=is_there)
        lines = read_metrics(run_dir)
        rewards = [line["reward/mean"] for line in lines]
        result = {
            **cell._asdict(), "target": target, "steps": steps_to(rewards, target), "steps_run": len(rewards),
            "last_reward": statistics.fmean(rewards[-WINDOW:]),
            "s_per_step": statistics.median(line["time/step"] for line in lines),
            "anchored_frac": statistics.fmean(line["episode/anchored_frac"] for line in lines), "machine": machine(),
        }  # fmt: skip
        with (directory / "credit.jsonl").open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{cell.name}: {result['steps']} steps, {result['s_per_step']:.2f} s each", file=sys.stderr, flush=True)


def config_of(cell: Cell, run_dir: Path) -> LearnerRun:
    flags = {
        "--run-dir": str(run_dir),
        "--seed": str(cell.seed),
        "--learner.environment.factory": f"{cell.recipe}_by_turn",
        "--learner.advantage.credit": cell.credit,
        "--learner.report.dashboard-port": "0",
    }
    arguments = [text for pair in flags.items() for text in pair]
    return load_config(LearnerRun, [str(path_of(cell)), *arguments], "learner train")


def recipe_of(cell: Cell) -> dict[str, Any]:
    return tomllib.loads(path_of(cell).read_text())


def path_of(cell: Cell) -> Path:
    return ROOT / f"deploy/recipes/{cell.recipe}.toml"


def has_reached(run_dir: Path, target: float) -> bool:
    """Return whether a run in progress has reached the target."""
    path = run_dir / "metrics.jsonl"
    complete = path.read_text().rpartition("\n")[0].splitlines() if path.is_file() else []
    return steps_to([json.loads(line)["reward/mean"] for line in complete], target) is not None


def steps_to(rewards: Sequence[float], target: float) -> int | None:
    """Return the first step at which the mean of the last WINDOW steps is at least the target."""
    ends = range(WINDOW, len(rewards) + 1)
    return next((end for end in ends if statistics.fmean(rewards[end - WINDOW : end]) >= target), None)


def cell_of(line: dict[str, Any]) -> Cell:
    return Cell(line["recipe"], line["seed"], line["credit"])


def finished(directory: Path) -> list[dict[str, Any]]:
    path = directory / "credit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def as_text(results: Sequence[dict[str, Any]]) -> str:
    """Return a line per recipe and credit: the steps of each seed, and their median if all seeds have reached it."""
    lines = [f"{'recipe':<12}{'credit':<10}{'steps to target, by seed':<28}{'median':>8}{'anchored':>10}"]
    for recipe, credit in itertools.product(RECIPES, CREDITS):
        of_both = sorted(
            (line for line in results if line["recipe"] == recipe and line["credit"] == credit), key=itemgetter("seed")
        )
        if not of_both:
            continue
        steps = [line["steps"] for line in of_both]
        texts = [str(line["steps"] or f"> {line['steps_run']}") for line in of_both]
        median = "–" if None in steps else f"{statistics.median(steps):g}"
        anchored = statistics.fmean(line["anchored_frac"] for line in of_both)
        lines.append(f"{recipe:<12}{credit:<10}{', '.join(texts):<28}{median:>8}{anchored:>10.0%}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
