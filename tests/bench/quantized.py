"""Train on quantized servers: `python -m tests.bench.quantized [--out runs/quantized] [--syncs 100] [--steps 40]`.

    --syncs    a tiny model reverses digits, with int8 weights and an fp8 KV cache
    --steps    SmolLM2 on sums, with int8 weights

Each part has three runs in bfloat16: unquantized, quantized, and quantized without a correction. Parity checks each
sync. Real vLLM is on core 0, the user's command on core 1. A finished run is only read; 0 leaves a part out.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from learner.evaluation.results import FILE, Evaluation, earlier
from learner.report.summary import read_metrics
from protocol.errors import SlipstreamError
from protocol.model_files import resolve_model
from tests.bench.colocated import ROOT
from tests.bench.machine import machine
from tests.inference_server.real_server import RealServer

RECIPES = ROOT / "deploy" / "recipes"
STEPS_PER_POINT = 5
TIMEOUT_S = 6 * 3600.0
Flags = tuple[str, ...]
INT8 = ("--server.quantization", "int8_per_channel_weight_only")
FP8_CACHE = ("--server.kv-cache-dtype", "fp8")
UNCORRECTED = ("--learner.off-policy-correction.weight", "none")
CHECK_ALL = ("--learner.parity.max-time-share", "1", "--learner.report.dashboard-port", "0")


class Part(NamedTuple):
    """What the three runs of a part have in common."""

    recipe: str
    model: str
    quantization: Flags
    server_flags: Flags
    learner_flags: Flags
    num_steps: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quantized", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/quantized"), help="directory of the runs")
    parser.add_argument("--syncs", type=int, default=100, help="weight syncs of each run of the tiny model")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run on sums")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    if options.syncs:
        flags = ("--learner.data.num-prompts", "64", "--learner.groups-per-step", "8")
        part = Part("reverse.toml", "tiny:digits", INT8 + FP8_CACHE, (), flags, options.syncs)
        result["reverse"] = three_runs(part, options.out / "reverse")
    if options.steps:
        flags = ("--server.max-model-len", "256", "--server.kv-cache-memory-mib", "1024")
        part = Part("smollm2.toml", "smollm2:135m-instruct", INT8, flags, (), options.steps)
        result["sums"] = three_runs(part, options.out / "sums")
    print(json.dumps(result, indent=1))


def three_runs(part: Part, directory: Path) -> dict[str, Any]:
    variants = {
        "unquantized": ((), ()),
        "quantized": (part.quantization, ()),
        "uncorrected": (part.quantization, UNCORRECTED),
    }
    results = {}
    for name, (of_server, of_learner) in variants.items():
        lines = run(part, directory / name, of_server, of_learner)
        evaluations = earlier(directory / name / "run" / FILE)
        results[name] = curve_of(lines) | {"evaluations": {str(one.step): reward_of(one) for one in evaluations}}
        results[name] |= parity_of(lines)
    return results


def run(part: Part, directory: Path, server_flags: Flags, learner_flags: Flags) -> list[dict[str, Any]]:
    """Train, unless done, and return the lines of metrics.jsonl. Raises SlipstreamError if the command fails."""
    run_dir = directory / "run"
    if (run_dir / "metrics.jsonl").exists() and len(lines := read_metrics(run_dir)) >= part.num_steps:
        return lines
    directory.mkdir(parents=True, exist_ok=True)
    flags = ("--dtype", "bfloat16", *part.server_flags, *server_flags, "--server.cpu-cores", "0")
    server = RealServer(directory, *flags, model=resolve_model(part.model))
    try:
        server.wait_for("ready after")
        command = [
            sys.executable, "-m", "learner", "train", str(RECIPES / part.recipe), "--model", part.model,
            "--endpoint", server.endpoint, "--run-dir", str(run_dir), "--learner.steps", str(part.num_steps),
            "--dtype", "bfloat16", *part.learner_flags, *learner_flags, *CHECK_ALL, "--learner.cpu-cores", "1",
            "--learner.evaluation.url", f"{server.url}/v1",
        ]  # fmt: skip
        with (directory / "learner.log").open("w") as log:
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=TIMEOUT_S, check=False).returncode
    finally:
        server.kill()
    if code:
        raise SlipstreamError(f"the learner ended with exit code {code}; see {directory / 'learner.log'}")
    return read_metrics(run_dir)


def parity_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    levels = [line["parity/abs_logprob"] for line in lines if line.get("parity/checked") == 1]
    return {
        "steps": len(lines),
        "checked": len(levels),
        "baseline": next((line[name] for line in lines if (name := "parity/quantized_abs_logprob") in line), None),
        "abs_logprob_mean": statistics.fmean(levels) if levels else None,
        "abs_logprob_max": max(levels, default=None),
        "unchanged_frac_max": max((line.get("parity/unchanged_frac", 0.0) for line in lines), default=None),
        "reward_last": lines[-1]["reward/mean"],
    }


def curve_of(lines: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = [line["reward/mean"] for line in lines]
    points = [rewards[start : start + STEPS_PER_POINT] for start in range(0, len(rewards), STEPS_PER_POINT)]
    mismatches = [line["policy/mismatch_abs_logprob"] for line in lines if "policy/mismatch_abs_logprob" in line]
    return {
        "rewards": [round(statistics.fmean(point), 3) for point in points],
        "mismatch_abs_logprob": statistics.fmean(mismatches) if mismatches else None,
        "seconds_per_step": statistics.median(line["time/step"] for line in lines),
    }


def reward_of(made: Evaluation) -> float | None:
    return made.reward.mean if made.reward is not None else None


if __name__ == "__main__":
    main()
