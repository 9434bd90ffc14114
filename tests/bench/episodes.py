"""Measure many concurrent episodes with slow tools: `python -m tests.bench.episodes --help`.

    episodes of up to four turns, 50 ms between them ─┐ real vLLM, a tiny model     idleness by the server's counters,
    the same with instant tools                      ─┴▶ and a learner ───────────▶ tokens per second: DIR/episodes.json

Exit code 1 if the server, which is the slower side, was idle for more than MAX_IDLE_FRAC of the time with slow tools.
It should never wait for a tool while there are other episodes to serve.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from learner.config import LearnerRun
from protocol.errors import SlipstreamError
from tests.bench import slow_tool
from tests.bench.colocated import read_metrics, run_colocated
from tests.bench.machine import machine, versions

MAX_IDLE_FRAC = 0.1
WARM_UP = 5
"""First steps, which are excluded."""
SIDES = {"slow": "SlowTool", "quick": "QuickTool"}
SERVER = {
    "max_concurrent_sequences": 64, "kv_cache_memory_mib": 64, "block_size": 32, "enforce_eager": True,
    "cpu_cores": [0],
}  # fmt: skip
LEARNER = {
    "groups_per_step": 16, "max_staleness": 2, "cpu_cores": [1],
    "data": {"task": "guess", "num_prompts": 1024},
    # A turn ends at any of these. The learning rate keeps the model untrained, so turns have about six tokens.
    "sampling": {"group_size": 8, "max_tokens": 24, "stop": ["=", "+"]},
    "reward": {"functions": ["environment_reward"]},
    "optimizer": {"learning_rate": 1e-9},
    "checkpoint": {"every_steps": 10**9},
    "report": {"dashboard_port": 0},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.episodes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-episodes"), help="directory of runs and results")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--episodes", type=int, default=64, help="concurrent episodes")
    options = parser.parse_args()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        result = run(options.out, options.steps, options.episodes)
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    (options.out / "episodes.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result) if options.json else "\n".join(f"{key:<24}{value}" for key, value in result.items()))
    sys.exit(0 if result["is_full"] else 1)


def run(out: Path, steps: int, num_episodes: int) -> dict[str, Any]:
    """Run both sides. Return the results, the headline first."""
    files = (out / time.strftime("files-%Y%m%d-%H%M%S")).resolve()
    found = {side: run_side(files / side, factory, steps, num_episodes) for side, factory in SIDES.items()}
    slow = found["slow"]
    return {
        "is_full": slow["server_idle_frac"] <= MAX_IDLE_FRAC,
        "tokens_ratio": slow["tokens_per_s"] / found["quick"]["tokens_per_s"],
        **found,
        "tool_s": slow_tool.SECONDS,
        "episodes_at_once": num_episodes,
        "machine": machine(),
        "versions": versions(Path(sys.executable)),
    }


def run_side(run_dir: Path, factory: str, steps: int, num_episodes: int) -> dict[str, float]:
    run = config_of(run_dir, factory, steps, num_episodes)
    seen = run_colocated(run, SERVER)
    lines = read_metrics(run_dir)
    steady = lines[WARM_UP:]
    seconds = steady[-1]["time"] - lines[WARM_UP - 1]["time"]
    return {
        "server_idle_frac": seen.idle_frac(lines[WARM_UP - 1]["time"], steady[-1]["time"]),
        "learner_idle_frac": statistics.fmean(line["perf/learner_idle_frac"] for line in steady),
        "tokens_per_s": sum(line["rollout/tokens"] for line in steady) / seconds,
        "turns_mean": statistics.fmean(line["episode/turns_mean"] for line in steady),
        "environment_s_per_episode": statistics.fmean(line["episode/environment_seconds"] for line in steady),
        "s_per_step": seconds / len(steady),
    }


def config_of(run_dir: Path, factory: str, steps: int, num_episodes: int) -> LearnerRun:
    environment = {"factory": f"tests.bench.slow_tool:{factory}", "max_turns": 4, "max_concurrent": num_episodes}
    table = {
        "model": "tiny:digits", "run_dir": str(run_dir), "dtype": "float32",
        "learner": LEARNER | {"steps": steps, "environment": environment},
    }  # fmt: skip
    return msgspec.convert(table, LearnerRun)


if __name__ == "__main__":
    main()
