"""Compare Slipstream with TRL on the same model, prompts, reward and loss: `python -m tests.bench.against_trl --help`.

    write_model, write_prompts ─▶ TRL in a virtual environment (trl_job.py)   ─┐
                               └▶ server and learner, started as a user does  ─┴▶ DIR/against_trl.json, a table or JSON

Runs alternate; results are medians over repetitions. The machine should be idle: both sides use all cores. The cell
`real` trains a pretrained model until it solves its task (real_cell.py), which takes hours.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from protocol.errors import SlipstreamError
from tests.bench import real_cell
from tests.bench.comparison import Rates, compare
from tests.bench.machine import machine, matrix_rate, versions
from tests.bench.trl_side import TrlRun, run_trl, trl_job
from tests.bench.trl_venv import trl_python
from tests.bench.workload import WORKLOADS, Workload, write_model, write_prompts
from tests.bench.workload_run import OWN_CORE, Run, config_of, run_workload

REAL = "real"
REAL_HEADLINES = ("time_to_reward_ratio", "samples_per_s_ratio", "time_to_reward_s", "s_per_step")
NUM_STEPS = {"a": 40, "b": 6, "c": 10}
MAX_STALENESS = 2
NOTES = [
    "TRL generates with transformers. Its "
    "vLLM modes do not run without a GPU: the server mode broadcasts weights by NCCL alone "
    "(VLLMClient.init_communicator refuses other devices); the colocated one calls load_weights on the running "
    "engine, whose weights vLLM's CPU backend has packed by then ('Parameter' object has no attribute "
    "'weight_loader'). Its continuous batching runs on a CPU, slower.",
    "Both sides compute in float32, on all cores of the machine: TRL as `python train.py` starts it, one process with "
    "a thread on each and its default cache; ours with one core for the server and the other for the learner "
    "(--learner-cores). A rank on each core and a static cache (--trl-processes, --trl-cache static) make TRL about "
    "as fast as it gets here.",
    "Ours with learner.compile, which a user sets for a run that is longer than a minute (--no-compile); TRL's "
    "torch_compile is a switch too (--trl-compile). What either takes for compiling at the start is in the steps that "
    "are left out.",
    "Lengths: the last norm's weights are small, so a completion ends at each token with probability 1/128 on either "
    "side, and the reward is the same on average at every length; expected_length is that distribution's mean, "
    "length_ratio the quotient of the measured means.",
    "real: TRL in bfloat16 by autocast where our default is bfloat16 (a CPU with AMX), its weights float32 as ours, "
    "one core more than our learner has, in the batch setting that was fastest of 32, 64, 128 and 256 rows; ours is "
    "deploy/recipes/smollm2.toml.",
    "Rewards are compared at the same policy versions: a batch that is two versions old shows the policy of two steps "
    "ago.",
]


def main() -> None:
    options = parse_options(sys.argv[1:])
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        result = run(options)
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    (options.out / "against_trl.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result) if options.json else as_text(result))


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.against_trl", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-against-trl"), help="directory of runs and results"
    )
    parser.add_argument("--cells", nargs="+", choices=[*sorted(WORKLOADS), REAL], default=sorted(WORKLOADS))
    parser.add_argument("--repetitions", type=int, default=3, help="repetitions of each side of each cell")
    parser.add_argument("--steps", type=int, help=f"steps of each run (default: {NUM_STEPS})")
    parser.add_argument("--warm-up", type=int, default=2, help="first steps of each run to exclude, at least 1")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--learner-cores", type=int, nargs="+", default=list(OWN_CORE), help="cores of Slipstream's learner"
    )
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="learner.compile of Slipstream (default: yes)",
    )
    parser.add_argument("--trl-processes", type=int, default=1, help="ranks that share the batch and the cores")
    parser.add_argument("--trl-cache", choices=["static"], help="cache for generation (default: that of transformers)")
    parser.add_argument("--trl-compile", action="store_true", help="torch_compile of TRL; recompiles at new shapes")
    parser.add_argument("--trl-rows", type=int, default=32, help="rows in one forward pass of TRL")
    parser.add_argument(
        "--trl-rows-real", type=int, default=64, help="rows in one forward pass of TRL in the cell `real`"
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every cell. Return all results in one object, the headlines first."""
    python = trl_python()
    files = options.out / time.strftime("files-%Y%m%d-%H%M%S")
    files.mkdir(parents=True)
    files = files.resolve()
    num_parameters = write_model(files / "model")
    cells = {
        name: run_real_cell(files, python, options)
        if name == REAL
        else run_cell(WORKLOADS[name], num_parameters, files, python, options)
        for name in options.cells
    }
    headlines = {
        f"{key}_{name}": cell[key]
        for key in ("time_to_reward_ratio", "samples_per_s_ratio", "limit_frac", "limit_frac_of_one_core")
        for name, cell in cells.items()
        if key in cell
    }
    return headlines | {
        "cells": cells,
        "num_parameters": num_parameters,
        "options": {key: str(value) for key, value in vars(options).items()},
        "notes": NOTES,
        "machine": machine(),
        "versions": {"ours": versions(Path(sys.executable)), "trl": versions(python)},
    }


def run_cell(
    workload: Workload, num_parameters: int, files: Path, python: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run both sides, each first in every other repetition."""
    write_prompts(workload, files / f"{workload.name}.jsonl")
    num_steps = options.steps or NUM_STEPS[workload.name]
    cores = tuple(options.learner_cores)
    trl: list[TrlRun] = []
    ours: list[Run] = []
    rates = Rates(num_cores=len(cores), of_one=[], of_all=[])
    for seed in range(options.repetitions):
        config = config_of(
            workload, files, files / f"ours-{workload.name}-{seed}", steps=num_steps, seed=seed,
            learning_rate=options.learning_rate, max_staleness=MAX_STALENESS, learner_cores=cores,
        )  # fmt: skip
        config = replace(config, learner=replace(config.learner, compile=options.compile))
        rates.of_one.append(matrix_rate(OWN_CORE))
        rates.of_all.append(matrix_rate(cores))
        for side in ("trl", "ours") if seed % 2 == 0 else ("ours", "trl"):
            say(f"cell {workload.name}, repetition {seed + 1} of {options.repetitions}: {side}")
            if side == "trl":
                trl.append(
                    run_trl(
                        trl_job(config, options.trl_rows, options.trl_cache, is_compiled=options.trl_compile),
                        files / f"trl-{workload.name}-{seed}",
                        python,
                        options.trl_processes,
                    )
                )
            else:
                ours.append(run_workload(config, options.warm_up))
    return compare(workload, trl, ours, rates, num_parameters, options.warm_up)


def run_real_cell(files: Path, python: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run both sides on the pretrained model, one after the other."""
    trl: list[TrlRun] = []
    ours: list[real_cell.OurRun] = []
    config = real_cell.config_of(files / "ours-real", 0)
    for seed in range(options.repetitions):
        config = real_cell.config_of(files / f"ours-real-{seed}", seed)
        for side in ("trl", "ours") if seed % 2 == 0 else ("ours", "trl"):
            say(f"cell real, repetition {seed + 1} of {options.repetitions}: {side}")
            if side == "trl":
                trl.append(real_cell.run_theirs(config, files / f"trl-real-{seed}", python, options.trl_rows_real))
            else:
                ours.append(real_cell.run_ours(config))
    samples_per_step = config.learner.groups_per_step * config.learner.sampling.group_size
    return real_cell.compare(trl, ours, samples_per_step) | {"dtype": config.dtype, "model": config.model}


def as_text(result: dict[str, Any]) -> str:
    lines = [
        f"{'cell':6}{'TRL s/step':>12}{'ours':>9}{'ratio':>8}{'limit':>8}"
        f"{'of one':>8}{'lengths':>16}{'learner idle':>14}"
    ]
    for name, cell in result["cells"].items():
        if name == REAL:
            lines.append(f"{name}: {json.dumps({key: cell[key] for key in REAL_HEADLINES})}")
            continue
        seconds, lengths = cell["s_per_step"], cell["completion_length_mean"]
        lines.append(
            f"{name:6}{seconds['trl']:>12.2f}{seconds['ours']:>9.2f}{cell['samples_per_s_ratio']:>8.2f}"
            f"{cell['limit_frac']:>8.2f}{cell['limit_frac_of_one_core']:>8.2f}"
            f"{lengths['trl']:>8.1f}{lengths['ours']:>8.1f}{cell['learner_idle_frac']:>14.1%}"
        )
    return "\n".join(lines)


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
