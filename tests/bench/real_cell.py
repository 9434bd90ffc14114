"""The cell `real` of against_trl: SmolLM2 learns sums until its greedy answers reach a mean reward of 0.8.

    deploy/recipes/smollm2.toml with evaluations ─▶ colocated.py, which ends at the target ─┐
             └▶ the same workload for TRL ──────▶ trl_job.py ─────────────────────────────┴▶ seconds to the target

Seconds count training alone, from the first step until the weights that reach the target. TRL's clock stops during
evaluations; Slipstream's does not, because the server answers evaluations while it generates.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import msgspec

from learner.config import LearnerRun
from learner.prompts.tasks import make_rows
from protocol.config import load_config
from protocol.model_files import resolve_model
from tests.bench import steps as arithmetic
from tests.bench.colocated import ROOT, read_metrics, run_colocated
from tests.bench.steps import Step, own_step
from tests.bench.trl_side import HeldOut, TrlRun, run_trl, trl_job

RECIPE = ROOT / "deploy" / "recipes" / "smollm2.toml"
TARGET = 0.8
EVALUATE_EVERY = 5
MAX_STEPS = 80
WARM_UP = 2


class OurRun(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one run of Slipstream."""

    steps: list[Step]
    evaluations: list[HeldOut]
    learner_idle_frac: float
    mismatch: float
    """Mean |Δ logprob| of fresh tokens between server and learner."""


def config_of(run_dir: Path, seed: int) -> LearnerRun:
    """Return the recipe with other evaluation and output settings."""
    flags = {
        "run-dir": run_dir, "seed": seed, "learner.steps": MAX_STEPS, "learner.evaluation.every-steps": EVALUATE_EVERY,
        "learner.evaluation.at-start": "false", "learner.checkpoint.every-steps": 10**9,
        "learner.report.dashboard-port": 0,
    }  # fmt: skip
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    return load_config(LearnerRun, [str(RECIPE), *words], "against_trl")


def run_ours(config: LearnerRun) -> OurRun:
    """Train until the target is reached, or for MAX_STEPS. Raises SlipstreamError if the run fails."""
    run_dir = Path(config.run_dir)
    run_colocated(config, config.server, is_done=lambda: _has_reached(run_dir))
    lines = read_metrics(run_dir)
    ended_s = {line["step"]: line["elapsed_s"] for line in lines}
    steps = [own_step(line) for line in lines]
    mismatches = [line["parity/abs_logprob"] for line in lines if "parity/abs_logprob" in line]
    return OurRun(
        steps=steps,
        evaluations=[
            HeldOut(step=step, elapsed_s=ended_s[step], reward=reward) for step, reward in _evaluations(run_dir).items()
        ],
        learner_idle_frac=arithmetic.idle_frac(steps, WARM_UP),
        mismatch=statistics.fmean(mismatches),
    )


def run_theirs(config: LearnerRun, directory: Path, python: Path, rows: int) -> TrlRun:
    """Train the same in TRL. Raises SlipstreamError if the run fails."""
    files = {}
    for name, task in (("prompts", "sums"), ("held_out", "sums_held_out")):
        files[name] = directory.with_suffix(f".{task}.jsonl")
        files[name].write_text("".join(json.dumps(row) + "\n" for row in make_rows(task, None, config.seed)))
    job = trl_job(config, rows) | {"model": str(resolve_model(config.model))}
    job |= {name: str(path) for name, path in files.items()} | {"evaluate_every": EVALUATE_EVERY, "target": TARGET}
    return run_trl(job, directory, python, 1)


def compare(trl: list[TrlRun], ours: list[OurRun], samples_per_step: int) -> dict[str, Any]:
    """Return medians over repetitions, and every repetition. A run that never reached the target has no time."""
    times = {side: [time_to_target(run.evaluations) for run in runs] for side, runs in (("trl", trl), ("ours", ours))}
    s_per_step = {
        side: [arithmetic.seconds_per_step(run.steps, WARM_UP) for run in runs]
        for side, runs in (("trl", trl), ("ours", ours))
    }
    medians = {side: statistics.median(values) for side, values in s_per_step.items()}
    reached = {side: [value for value in values if value is not None] for side, values in times.items()}
    is_whole = all(len(reached[side]) == len(times[side]) for side in times)
    return {
        "time_to_reward_ratio": statistics.median(reached["trl"]) / statistics.median(reached["ours"])
        if is_whole
        else None,
        "samples_per_s_ratio": medians["trl"] / medians["ours"],
        "time_to_reward_s": times,
        "target": TARGET,
        "s_per_step": medians,
        "s_per_step_by_repetition": s_per_step,
        "samples_per_s": {side: samples_per_step / value for side, value in medians.items()},
        "held_out": {
            side: [
                [(one.step, round(one.elapsed_s, 1), round(one.reward, 4)) for one in run.evaluations] for run in runs
            ]
            for side, runs in (("trl", trl), ("ours", ours))
        },
        "completion_length_mean": {
            side: statistics.median(arithmetic.length_mean(run.steps, WARM_UP) for run in runs)
            for side, runs in (("trl", trl), ("ours", ours))
        },
        "learner_idle_frac": statistics.median(run.learner_idle_frac for run in ours),
        "mismatch": statistics.median(run.mismatch for run in ours),
    }


def time_to_target(evaluations: list[HeldOut]) -> float | None:
    """Return the seconds until the weights whose evaluation first reached the target."""
    return next((one.elapsed_s for one in evaluations if one.reward >= TARGET), None)


def _has_reached(run_dir: Path) -> bool:
    return any(reward >= TARGET for reward in _evaluations(run_dir).values())


def _evaluations(run_dir: Path) -> dict[int, float]:
    """Return the held-out reward by step of the finished evaluations."""
    file = run_dir / "evaluations.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return {line["step"]: line["reward"]["mean"] for line in lines}
