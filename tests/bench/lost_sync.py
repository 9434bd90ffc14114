"""Measure how soon a lost weight sync is noticed: `python -m tests.bench.lost_sync [--json] [--steps 200] [--lost 5]`.

SmolLM2 in bfloat16 at a learning rate of 1e-6 on real vLLM: a healthy run, which must raise no alarm, and runs whose
server loses one sync.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from protocol.errors import SlipstreamError
from tests.bench.colocated import ROOT, read_metrics
from tests.bench.machine import machine
from tests.inference_server.broken_transfer import LOST_VERSION
from tests.inference_server.real_server import RealServer

RECIPE = ROOT / "deploy" / "recipes" / "smollm2.toml"
NEVER = 10**9
TIMEOUT_S = 3 * 3600.0
FLAGS = {
    "dtype": "bfloat16", "learner.optimizer.learning-rate": "1e-6", "learner.groups-per-step": "4",
    "learner.max-staleness": "1",
    "learner.sampling.group-size": "4", "learner.evaluation.every-steps": "0", "learner.evaluation.at-start": "false",
    "learner.checkpoint.every-steps": str(NEVER), "learner.report.dashboard-port": "0",
    "learner.parity.max-time-share": "1",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.lost_sync", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--steps", type=int, default=200, help="steps of the healthy run")
    parser.add_argument("--lost", type=int, nargs="*", default=[2, 5, 11], help="versions to lose, one per run")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "lost": {}}
    with tempfile.TemporaryDirectory(prefix="lost-sync-") as directory:
        healthy = run(Path(directory) / "healthy", options.steps, lost=None)
        result["healthy"] = healthy
        for version in options.lost:
            result["lost"][version] = run(Path(directory) / f"lost-{version}", version + 6, lost=version)
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))
    if healthy["alarm"] or any(one["steps_until_noticed"] is None for one in result["lost"].values()):
        sys.exit(1)


def run(directory: Path, num_steps: int, *, lost: int | None) -> dict[str, Any]:
    """Train on a server that loses the sync of version `lost`, or none. Raises SlipstreamError."""
    directory.mkdir(parents=True)
    os.environ[LOST_VERSION] = str(NEVER if lost is None else lost)
    flags = ["--dtype", "bfloat16", "--server.max-model-len", "256", "--server.cpu-cores", "0"]
    server = RealServer(directory, *flags, model=Path("smollm2:135m-instruct"), program="tests.bench.losing_server")
    try:
        server.wait_for("ready after")
        words = [word for key, value in FLAGS.items() for word in (f"--{key}", value)]
        words += ["--endpoint", server.endpoint, "--run-dir", str(directory / "run"), "--learner.steps", str(num_steps)]
        command = [sys.executable, "-m", "learner", "train", str(RECIPE), *words, "--learner.cpu-cores", "1"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    finally:
        server.kill()
    output = done.stdout + done.stderr
    alarm = re.search(r"the weights of version (\d+) did not reach the engine .*", output)
    if done.returncode and alarm is None:
        raise SlipstreamError(f"the learner ended with exit code {done.returncode}:\n{output[-3000:]}")
    lines = read_metrics(directory / "run")
    checked = [line for line in lines if "parity/unchanged_frac" in line]
    return {
        "steps": len(lines),
        "checks": len(checked),
        "alarm": alarm[0] if alarm else None,
        "steps_until_noticed": len(lines) + 1 - lost if alarm and lost is not None else None,
        "unchanged_frac_max": max((line["parity/unchanged_frac"] for line in checked), default=None),
        "learner_change": _mean(checked, "parity/learner_change"),
        "server_change": _mean(checked, "parity/server_change"),
        "abs_logprob_mean": _mean(checked, "parity/abs_logprob"),
        "abs_logprob_max": max((line["parity/abs_logprob"] for line in checked), default=None),
    }


def _mean(lines: list[dict[str, float]], metric: str) -> float | None:
    return sum(line[metric] for line in lines) / len(lines) if lines else None


if __name__ == "__main__":
    main()
