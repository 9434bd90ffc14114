"""Compare asynchronous with synchronous training: `python -m tests.bench.pipeline [--json] [--steps N] [--target R]`.

    the workload of cell b, max_staleness 2 with overlapped syncs ─┐ seconds to equal reward, and idle times
    the same at max_staleness 0                                   ─┴▶ DIR/pipeline.json, a table or JSON

Runs alternate; results are medians over repetitions. At staleness 0, server and learner work in turn, so the parts of a
step are the time that each takes alone; they predict the idleness of the asynchronous run. The machine should be idle.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from protocol.errors import SlipstreamError
from tests.bench.against_trl import say
from tests.bench.machine import machine, versions
from tests.bench.steps import length_mean, predicted_idle, seconds_per_step, seconds_to_reward
from tests.bench.workload import WORKLOADS, write_model, write_prompts
from tests.bench.workload_run import Run, config_of, run_workload

STALENESS = {"async": 2, "sync": 0}
IDLE_TOLERANCE = 0.1


def main() -> None:
    options = parse_options(sys.argv[1:])
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        result = run(options)
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    (options.out / "pipeline.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result) if options.json else as_text(result))


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.pipeline", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-pipeline"), help="directory of runs and results")
    parser.add_argument("--cell", choices=sorted(WORKLOADS), default="b")
    parser.add_argument("--repetitions", type=int, default=3, help="repetitions of each side")
    parser.add_argument("--steps", type=int, default=24, help="steps of each run")
    parser.add_argument("--target", type=float, default=0.6, help="mean reward to reach (chance level: 0.504)")
    parser.add_argument(
        "--warm-up", type=int, default=2, help="first steps to exclude from idle shares and seconds, at least 1"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run both, each first in every other repetition. Return all results in one object, the headlines first."""
    workload = WORKLOADS[options.cell]
    files = (options.out / time.strftime("files-%Y%m%d-%H%M%S")).resolve()
    files.mkdir(parents=True)
    write_model(files / "model")
    write_prompts(workload, files / f"{workload.name}.jsonl")
    runs: dict[str, list[Run]] = {side: [] for side in STALENESS}
    for seed in range(options.repetitions):
        for side in sorted(STALENESS, reverse=seed % 2 == 1):
            say(f"repetition {seed + 1} of {options.repetitions}: {side}")
            config = config_of(
                workload, files, files / f"{side}-{seed}", steps=options.steps, seed=seed,
                learning_rate=options.learning_rate, max_staleness=STALENESS[side],
            )  # fmt: skip
            runs[side].append(run_workload(config, options.warm_up))
    return compare(runs, options.cell, options.target, options.warm_up) | {
        "options": {key: str(value) for key, value in vars(options).items()},
        "machine": machine(),
        "versions": versions(Path(sys.executable)),
    }


def compare(runs: dict[str, list[Run]], cell: str, target: float, warm_up: int) -> dict[str, Any]:
    """Return medians over repetitions. Without a ratio if a side missed the target in any repetition."""
    to_target = {side: [seconds_to_reward(run.steps, target) for run in of_side] for side, of_side in runs.items()}
    medians = {side: median_if_all(values) for side, values in to_target.items()}
    seconds = {
        side: statistics.median(seconds_per_step(run.steps, warm_up) for run in of_side)
        for side, of_side in runs.items()
    }
    alone_s = {
        "generation": statistics.median(generation_s(run) for run in runs["sync"]),
        "training": statistics.median(training_s(run) for run in runs["sync"]),
    }
    predicted = predicted_idle(alone_s["generation"], alone_s["training"])
    measured = {
        "server": statistics.median(run.server_idle_frac for run in runs["async"]),
        "learner": statistics.median(run.learner_idle_frac for run in runs["async"]),
    }
    faster = max(predicted, key=lambda side: predicted[side])
    is_reached = medians["sync"] is not None and medians["async"] is not None
    return {
        f"async_over_sync_{cell}": medians["sync"] / medians["async"] if is_reached else None,
        "idle_explained": abs(predicted[faster] - measured[faster]) <= IDLE_TOLERANCE,
        "faster_side": faster,
        "idle_measured": measured,
        "idle_predicted": predicted,
        "idle_tolerance": IDLE_TOLERANCE,
        "alone_s_per_step": alone_s,
        "target": target,
        "s_to_target": medians,
        "s_to_target_by_repetition": to_target,
        "s_per_step": seconds,
        "steps_per_s_ratio": seconds["sync"] / seconds["async"],
        "reward_of_last_step": {side: [run.steps[-1].reward_mean for run in of_side] for side, of_side in runs.items()},
        "completion_length_mean": {
            side: statistics.median(length_mean(run.steps, warm_up) for run in of_side)
            for side, of_side in runs.items()
        },
        "phases_s": {side: of_side[-1].phases_s for side, of_side in runs.items()},
    }


def generation_s(run: Run) -> float:
    """Return the generation time of a synchronous step, which is the learner's wait."""
    return run.phases_s["time/wait_for_batch"]


def training_s(run: Run) -> float:
    """Return the training time of a synchronous step: all except the wait."""
    return run.phases_s["time/step"] - run.phases_s["time/wait_for_batch"]


def median_if_all(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def as_text(result: dict[str, Any]) -> str:
    simple = {key: value for key, value in result.items() if not isinstance(value, dict | list)}
    shown = ("s_to_target", "s_per_step", "idle_measured", "idle_predicted")
    return "\n".join(f"{key:<32}{value}" for key, value in (simple | {key: result[key] for key in shown}).items())


if __name__ == "__main__":
    main()
