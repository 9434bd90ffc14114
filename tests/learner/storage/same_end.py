"""Runs whose ends can be compared bit for bit: policy, optimizer, reference, generators, ledger, losses.

They run at staleness 0 in float32 on one thread.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from learner.config import LearnerRun
from learner.storage.checkpoint import find_checkpoint
from tests.learner.checkpoints import tensors_of
from tests.learner.runs import batches_of, make_run, metrics_of, seeded

LOSSES = ("loss/policy", "optim/lr", "optim/grad_norm", "reference/kl", "reference/kl_coef", "reference/version",
          "reward/mean", "policy/entropy", "batch/replaced_groups")  # fmt: skip


def make_comparable_run(path: Path, endpoint: str, **learner: Any) -> LearnerRun:
    path.mkdir()
    return make_run(path, endpoint, **({"checkpoint": {"every_steps": 2}, "steps": 5} | seeded() | learner))


def newest_checkpoint(run: LearnerRun) -> Path:
    checkpoint = find_checkpoint(Path(run.run_dir) / "checkpoints")
    assert checkpoint is not None
    return checkpoint


def everything_in(run: LearnerRun) -> dict[str, torch.Tensor]:
    """Return all tensors of the newest checkpoint: policy, export, references, moments, generators."""
    checkpoint = newest_checkpoint(run)
    return tensors_of(checkpoint) | {
        f"{file.relative_to(checkpoint)}:{name}": tensor
        for file in checkpoint.rglob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def losses_of(run: LearnerRun) -> list[dict[str, float]]:
    """Return the last line of every step: the line of a repeated step follows the first one."""
    last = {line["step"]: {key: line[key] for key in LOSSES if key in line} for line in metrics_of(run)}
    return [last[step] for step in sorted(last)]


def assert_ends_alike(run: LearnerRun, whole: LearnerRun) -> None:
    tensors, expected = everything_in(run), everything_in(whole)
    assert tensors.keys() == expected.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])] == []
    assert newest_checkpoint(run).name == newest_checkpoint(whole).name
    state, expected_state = (json.loads((newest_checkpoint(of) / "state.json").read_text()) for of in (run, whole))
    assert state == expected_state
    assert losses_of(run) == losses_of(whole)
    assert batches_of(run) == batches_of(whole)
