"""The grid of the learning benchmark: which runs there are, and the learner's config of each.

A cell is one run: a task, an algorithm, a staleness, a reference and a seed. Invariant: a cell's config is a valid config
of `learner train`, so what the benchmark compares is what a user can set.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from learner.config import LearnerRun
from protocol.model_files import cache_dir, resolve_model

TASKS: dict[str, dict[str, Any]] = {
    "sort": {
        "steps": 400,
        "data": {"task": "sort", "num_digits": 4, "num_prompts": 4096},
        "sampling": {"num_completions": 16, "max_tokens": 5},
        "reward": {"functions": ["share_right", "exact_match"], "weights": [1.0, 0.0]},
        "optimizer": {"learning_rate": 2e-3},
    },
    "arithmetic": {
        "steps": 1200,
        "data": {"task": "arithmetic", "num_digits": 2, "num_prompts": 4096},
        "sampling": {"num_completions": 16, "max_tokens": 4},
        "reward": {"functions": ["exact_match"]},
        "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 10.0},
        "warm_start": {"steps": 400, "learning_rate": 1e-3, "rows_per_step": 8},
    },
}
NUM_TASK_PROMPTS = 10_000
"""Distinct prompts of either task; those a run does not train on are held out."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "cispo": {"loss": {"objective": "cispo"}},
    "gspo": {"loss": {"objective": "gspo"}},
    "decoupled": {"correction": {"anchor": "proximal", "proximal": "log_linear", "weight": "truncate"}},
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
SEEDS = (0, 1, 2, 3)
KL_COEF = 0.01
"""Of every cell with a reference."""
SERVED_HEADS = 2
"""Attention heads of tiny:digits: of width 32, the narrowest that vLLM's CPU kernels have."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the grid."""

    task: str
    algorithm: str
    max_staleness: int
    reference: str = "none"
    seed: int = 0
    learning_rate: float | None = None
    """None: the task's."""
    heads: int = SERVED_HEADS

    @property
    def name(self) -> str:
        """As in `sort/grpo/stale4/none/seed0`; what --only is matched with."""
        name = f"{self.task}/{self.algorithm}/stale{self.max_staleness}/{self.reference}/seed{self.seed}"
        if self.learning_rate is not None:
            name += f"/lr{self.learning_rate:g}"
        return name if self.heads == SERVED_HEADS else f"{name}/heads{self.heads}"

    def run(self, run_dir: str = "none") -> LearnerRun:
        """Return the config. Raises msgspec.ValidationError where the learner refuses it."""
        algorithm = ALGORITHMS[self.algorithm]
        if self.algorithm == "decoupled" and self.max_staleness == 0:
            # The learner refuses log_linear here: without stale tokens there is nothing to interpolate.
            algorithm = {"correction": {"anchor": "proximal", "weight": "truncate"}}
        learner = {"groups_per_step": 16, "max_staleness": self.max_staleness, "dashboard_port": 0, "trackers": []}
        learner |= TASKS[self.task] | algorithm
        if self.learning_rate is not None:
            learner |= {"optimizer": {"learning_rate": self.learning_rate}}
        if self.reference != "none":
            learner |= {"reference": REFERENCES[self.reference], "kl": {"coef": KL_COEF}}
        run = {"model": model_with(self.heads), "run_dir": run_dir, "dtype": "float32", "seed": self.seed}
        return msgspec.convert(run | {"learner": learner}, LearnerRun)

    @property
    def settings_hash(self) -> str:
        """Changes with any setting of the run."""
        return hashlib.sha256(msgspec.json.encode(self.run().learner)).hexdigest()[:12]


def model_with(heads: int) -> str:
    """Return tiny:digits, or a copy of it with the same weights that attends with another number of heads."""
    if heads == SERVED_HEADS:
        return "tiny:digits"
    tiny = resolve_model("tiny:digits")
    final = cache_dir() / f"{tiny.name}-{heads}-heads"
    if not final.is_dir():
        aside = Path(tempfile.mkdtemp(dir=final.parent))
        shutil.copytree(tiny, aside, dirs_exist_ok=True)
        config = json.loads((aside / "config.json").read_text()) | {"n_head": heads}
        (aside / "config.json").write_text(json.dumps(config))
        aside.rename(final)
    return str(final)


def grid(tasks: list[str], seeds: list[int], heads: int = SERVED_HEADS) -> list[Cell]:
    """Every algorithm at every staleness, then every reference at staleness 4; all cells of a seed before the next."""
    cells = []
    for seed in seeds:
        for task in tasks:
            cells += [
                Cell(task=task, algorithm=algorithm, max_staleness=staleness, seed=seed, heads=heads)
                for algorithm in ALGORITHMS
                for staleness in STALENESSES
            ]
            cells += [
                Cell(task=task, algorithm="grpo", max_staleness=4, reference=reference, seed=seed, heads=heads)
                for reference in REFERENCES
                if reference != "none"
            ]
    return cells
