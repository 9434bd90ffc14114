"""The grid of the learning benchmark: its runs, and the learner's config of each.

A cell is one run: a task, an algorithm, a staleness, a reference and a seed. Invariant: a cell's config is a valid
config of `learner train`, so the benchmark compares only what a user can set.
"""

import hashlib
import math
from typing import Any

import msgspec

from learner.config import LearnerRun

LARGE_STEPS = "sort-large-steps"
"""The task `sort` with torch's AdamW defaults, a constant large learning rate and no gradient clipping. Only the ratio
limits a step, so corrections differ visibly. PPO's clip is two-sided here; otherwise the weight of a token with a
negative advantage grows with its ratio."""
TASKS: dict[str, dict[str, Any]] = {
    "sort": {
        "steps": 400,
        "data": {"task": "sort", "num_digits": 4, "num_prompts": 4096},
        "sampling": {"group_size": 16, "max_tokens": 5},
        "reward": {"functions": ["share_right", "exact_match"], "weights": [1.0, 0.0]},
        "optimizer": {"learning_rate": 2e-3, "warmup_steps": 40, "schedule": "linear"},
    },
    "arithmetic": {
        "steps": 1200,
        "data": {"task": "arithmetic", "num_digits": 2, "num_prompts": 4096},
        "sampling": {"group_size": 16, "max_tokens": 4},
        "reward": {"functions": ["exact_match"]},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 40, "schedule": "linear", "max_grad_norm": 10.0},
        "warm_start": {"steps": 400, "learning_rate": 1e-3, "rows_per_step": 16},
    },
}
TASKS[LARGE_STEPS] = TASKS["sort"] | {
    "optimizer": {"learning_rate": 2e-3, "beta2": 0.999, "weight_decay": 0.01, "max_grad_norm": math.inf},
    "loss": {"dual_clip": 1.29},
}
NUM_TASK_PROMPTS = 10_000
"""Distinct prompts of each task. Prompts that a run does not train on are held out."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "cispo": {"loss": {"objective": "cispo"}},
    "gspo": {"loss": {"objective": "gspo", "normalization": "token"}},  # as when the results were measured
    "decoupled": {"off_policy_correction": {"anchor": "proximal", "proximal": "log_linear", "weight": "truncate"}},
    "uncorrected": {"loss": {"objective": "reinforce"}},
}
REFERENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "fixed": {"kind": "fixed"},
    "every": {"kind": "every", "every_steps": 50},
    "ema": {"kind": "ema", "every_steps": 5, "alpha": 0.1},
    "adaptive": {"kind": "adaptive", "kl_threshold": 0.2},
}
STALENESSES = (0, 1, 4, 8)
NUM_SEEDS = {"sort": 4, "arithmetic": 4, LARGE_STEPS: 8}
"""Number of seeds. Larger steps have a larger variance between seeds."""
KL_COEF = 0.01
"""KL coefficient of every cell with a reference."""
KINDS = [
    *((algorithm, staleness, "none") for algorithm in ALGORITHMS for staleness in STALENESSES),
    *(("grpo", 4, reference) for reference in REFERENCES if reference != "none"),
]
"""Every algorithm at every staleness, then every reference at staleness 4."""
LARGE_STEP_KINDS = [("grpo", 8, "none"), ("gspo", 8, "none"), ("uncorrected", 8, "none")]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the grid."""

    task: str
    algorithm: str
    max_staleness: int
    reference: str = "none"
    seed: int = 0

    @property
    def name(self) -> str:
        """Name such as `sort/grpo/stale4/none/seed0`, which --only matches."""
        return f"{self.task}/{self.algorithm}/stale{self.max_staleness}/{self.reference}/seed{self.seed}"

    def run(self, run_dir: str = "none") -> LearnerRun:
        """Return the config. Raises msgspec.ValidationError if the learner rejects it."""
        algorithm = ALGORITHMS[self.algorithm]
        if self.algorithm == "decoupled" and self.max_staleness == 0:
            # log_linear has no effect without stale tokens.
            algorithm = {"off_policy_correction": {"anchor": "proximal", "weight": "truncate"}}
        report = {"dashboard_port": 0, "trackers": []}
        learner = {"groups_per_step": 16, "max_staleness": self.max_staleness, "report": report}
        learner |= TASKS[self.task] | algorithm
        if self.reference != "none":
            learner |= {"reference": REFERENCES[self.reference], "kl": {"coef": KL_COEF}}
        run = {"model": "tiny:digits", "run_dir": run_dir, "dtype": "float32", "seed": self.seed}
        return msgspec.convert(run | {"learner": learner}, LearnerRun)

    @property
    def settings_hash(self) -> str:
        """Hash of all settings of the run."""
        return hashlib.sha256(msgspec.json.encode(self.run().learner)).hexdigest()[:12]


def grid(tasks: list[str], seeds: list[int] | None = None) -> list[Cell]:
    """Return the cells of the given seeds, or of each task's seeds, one seed after the other.

    With large steps: only the clips and no correction.
    """
    return [
        Cell(task=task, algorithm=algorithm, max_staleness=staleness, reference=reference, seed=seed)
        for seed in (range(max(NUM_SEEDS.values())) if seeds is None else seeds)
        for task in tasks
        if seeds is not None or seed < NUM_SEEDS[task]
        for algorithm, staleness, reference in (LARGE_STEP_KINDS if task == LARGE_STEPS else KINDS)
    ]
