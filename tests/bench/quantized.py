"""Train on quantized servers: `python -m tests.bench.quantized [--out runs/quantized] [--syncs 100] [--steps 40]`.

    --syncs    a tiny model on a server with int8 weights and an fp8 KV cache, each sync checked by parity
    --steps    SmolLM2 on sums: an unquantized server, an int8 server, and one without a correction

Real vLLM on core 0, the user's command on core 1. A finished run is only read; 0 leaves a part out.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.errors import SlipstreamError
from protocol.model_files import resolve_model
from tests.bench.colocated import ROOT, read_metrics
from tests.bench.machine import machine
from tests.inference_server.real_server import RealServer

RECIPES = ROOT / "deploy" / "recipes"
STEPS_PER_POINT = 5
TIMEOUT_S = 6 * 3600.0
INT8 = ("--server.quantization", "int8_per_channel_weight_only")
FP8_CACHE = ("--server.kv-cache-dtype", "fp8")
SUMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unquantized": ((), ()),
    "int8": (INT8, ()),
    "int8, uncorrected": (INT8, ("--learner.off-policy-correction.weight", "none")),
}
"""Flags of the server and of the learner."""
CHECK_ALL = ("--learner.parity.max-time-share", "1", "--learner.report.dashboard-port", "0")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quantized", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/quantized"), help="directory of the runs")
    parser.add_argument("--syncs", type=int, default=100, help="weight syncs of the tiny model")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run on sums")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    if options.syncs:
        flags = ("--learner.data.num-prompts", "64", "--learner.groups-per-step", "8", "--dtype", "bfloat16")
        name, server = "syncs", ("--dtype", "bfloat16", *INT8, *FP8_CACHE)
        lines = run(options.out / name, "reverse.toml", "tiny:digits", server, flags, options.syncs)
        result[name] = parity_of(lines)
    if options.steps:
        for name, (of_server, of_learner) in SUMS.items():
            server = ("--dtype", "bfloat16", "--server.max-model-len", "256", "--server.kv-cache-memory-mib", "1024")
            directory, flags = options.out / name.replace(", ", "-"), ("--dtype", "bfloat16", *of_learner)
            lines = run(directory, "smollm2.toml", "smollm2:135m-instruct", server + of_server, flags, options.steps)
            result[name] = curve_of(lines) | parity_of(lines)
    print(json.dumps(result, indent=1))


def run(
    directory: Path, recipe: str, model: str, server_flags: tuple[str, ...], flags: tuple[str, ...], num_steps: int
) -> list[dict[str, Any]]:
    """Train, unless done, and return the lines of metrics.jsonl. Raises SlipstreamError if the command fails."""
    run_dir = directory / "run"
    if (run_dir / "metrics.jsonl").exists() and len(lines := read_metrics(run_dir)) >= num_steps:
        return lines
    directory.mkdir(parents=True, exist_ok=True)
    server = RealServer(directory, *server_flags, "--server.cpu-cores", "0", model=resolve_model(model))
    try:
        server.wait_for("ready after")
        command = [
            sys.executable, "-m", "learner", "train", str(RECIPES / recipe), "--model", model,
            "--endpoint", server.endpoint, "--run-dir", str(run_dir), "--learner.steps", str(num_steps), *flags,
            *CHECK_ALL, "--learner.cpu-cores", "1", "--learner.evaluation.url", f"{server.url}/v1",
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
        "evaluations": {
            str(line["step"]): line[name] for line in lines for name in line if name == "evaluation/reward"
        },
    }


if __name__ == "__main__":
    main()
