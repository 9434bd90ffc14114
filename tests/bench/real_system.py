"""The main cells of the learning benchmark in the whole system: vLLM server, learner, sockets, weight syncs.

A cell's run directory is DIR/real/<cell>. An interrupted run is resumed; a finished run is only read.
"""

import statistics
from pathlib import Path
from typing import Any

from safetensors.torch import load_model

from learner.config import LearnerRun
from learner.policy.model import load_policy, load_tokenizer
from learner.storage.checkpoint import find_checkpoint, step_of
from protocol.model_files import resolve_model
from tests.bench.cell import Cell
from tests.bench.colocated import read_metrics, run_colocated
from tests.bench.sampler import exact_match
from tests.bench.trial import EVALUATE_EVERY, Trial, held_out_prompts

SERVER = {
    "max_concurrent_sequences": 256,
    "kv_cache_memory_mib": 64,
    "block_size": 32,
    "enforce_eager": True,
}


def run_real_cells(directory: Path, seeds: list[int], trials: dict[Cell, Trial]) -> list[dict[str, Any]]:
    """Run sort with grpo at staleness 0 and 4. Return their results and those of the in-process cells."""
    cells = [Cell(task="sort", algorithm="grpo", max_staleness=staleness,
        seed=seed) for seed in seeds for staleness in (0, 4)]  # fmt: skip
    return [run_real_cell(cell, directory / "real") | {"in_process": _beside(trials.get(cell))} for cell in cells]


def run_real_cell(cell: Cell, directory: Path) -> dict[str, Any]:
    """Train one cell with the user's command, unless finished. Raises SlipstreamError if the command fails."""
    run_dir = directory / cell.name.replace("/", "-")
    run = cell.run(str(run_dir))
    if _steps_done(run_dir) < run.learner.steps:
        run_colocated(run, SERVER, resume=(run_dir / "config.toml").exists())
    lines = read_metrics(run_dir)
    sampled = [
        statistics.fmean(line["reward/exact_match"] for line in lines[start : start + EVALUATE_EVERY])
        for start in range(0, len(lines), EVALUATE_EVERY)
    ]
    return {
        "cell": cell.name,
        "final": _final_exact_match(run, run_dir),
        "sampled_final": sampled[-1],
        "sampled_best": max(sampled),
        "staleness_mean": statistics.fmean(line["staleness/mean"] for line in lines),
        "steps": len(lines),
    }


def _steps_done(run_dir: Path) -> int:
    checkpoint = find_checkpoint(run_dir / "checkpoints")
    return step_of(checkpoint) if checkpoint else 0


def _final_exact_match(run: LearnerRun, run_dir: Path) -> float:
    """Return the greedy exact match of the last checkpoint on the held-out prompts."""
    checkpoint = find_checkpoint(run_dir / "checkpoints")
    assert checkpoint is not None
    model_path = resolve_model(run.model)
    policy = load_policy(model_path, gradient_checkpointing=False)
    load_model(policy, checkpoint / "model" / "model.safetensors")
    return exact_match(policy, held_out_prompts(run), load_tokenizer(model_path), run.learner.sampling.max_tokens)


def _beside(trial: Trial | None) -> dict[str, float] | None:
    if trial is None:
        return None
    sampled = [point.sampled_exact_match or 0.0 for point in trial.curve[1:]]
    return {"final": trial.final, "best": trial.best, "sampled_final": sampled[-1], "sampled_best": max(sampled)}
