"""Run a workload in Slipstream, started as a user does: server and learner on one node with two cores.

Workload ─▶ a config of defaults, except for settings equal on both sides ─▶ colocated.py ─▶ Run: steps, idleness
"""

from pathlib import Path
from typing import Any

import msgspec

from learner.config import LearnerRun
from tests.bench.colocated import read_metrics, run_colocated
from tests.bench.steps import Step, idle_frac, own_step
from tests.bench.workload import GROUPS_PER_STEP, NUM_COMPLETIONS, Workload

SERVER = {
    "max_concurrent_sequences": 256,
    "kv_cache_memory_mib": 1024,
    "block_size": 32,
    "cpu_cores": [0],
}
OWN_CORE = (1,)
"""Core of the learner. The server uses the other."""
NEVER = 10**9


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one run. Idle shares and seconds exclude the warm-up steps."""

    steps: list[Step]
    server_idle_frac: float
    """Idle share by the server's counter of seconds."""
    learner_idle_frac: float
    phases_s: dict[str, float]
    """Mean time/<phase> of the learner per step."""


def config_of(
    workload: Workload, files: Path, run_dir: Path, *, steps: int, learning_rate: float, max_staleness: int,
    learner_cores: tuple[int, ...] = OWN_CORE, seed: int = 0,
) -> LearnerRun:  # fmt: skip
    """Return the config: the settings of the comparison, otherwise defaults."""
    learner = {
        "steps": steps,
        "groups_per_step": GROUPS_PER_STEP,
        "max_staleness": max_staleness,
        "cpu_cores": learner_cores,
        "data": {"path": str(files / f"{workload.name}.jsonl")},
        "sampling": {"group_size": NUM_COMPLETIONS, "max_tokens": workload.max_tokens},
        "reward": {"functions": ["tests.bench.good_share:good_share"]},
        "optimizer": {"learning_rate": learning_rate},
        "weight_sync": {"overlap_with_training": max_staleness > 0},
        "checkpoint": {"every_steps": NEVER},
        "report": {"dashboard_port": 0},
    }
    run = {"model": str(files / "model"), "run_dir": str(run_dir), "dtype": "float32", "seed": seed}
    return msgspec.convert(run | {"learner": learner}, LearnerRun)


def run_workload(run: LearnerRun, warm_up: int) -> Run:
    """Train to the end. Raises SlipstreamError if the run fails."""
    seen = run_colocated(run, SERVER)
    lines = read_metrics(Path(run.run_dir))
    steps = [own_step(line) for line in lines]
    steady = lines[warm_up:]
    return Run(
        steps=steps,
        server_idle_frac=seen.idle_frac(lines[warm_up - 1]["time"], lines[-1]["time"]),
        learner_idle_frac=idle_frac(steps, warm_up),
        phases_s={key: _mean(steady, key) for key in sorted(steady[-1]) if key.startswith("time/")},
    )


def _mean(lines: list[dict[str, Any]], metric: str) -> float:
    return sum(line.get(metric, 0.0) for line in lines) / len(lines)
