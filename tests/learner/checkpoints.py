"""Write and read whole checkpoints, for tests of their contents."""

from pathlib import Path

import torch
from accelerate.utils.other import load

from learner.policy.shards import POLICY, begin_writing, read_index, read_into, written
from learner.storage.checkpoint import RunProgress
from learner.storage.writer import CheckpointWriter
from learner.training.policy_trainer import PolicyTrainer


def save(trainer: PolicyTrainer, directory: Path, step: int) -> Path:
    """Write a checkpoint and wait for it. Every rank must call this."""
    with CheckpointWriter(trainer, directory) as writer:
        writer.begin(step, RunProgress(), None, lambda: None)
        writer.wait()
    return directory / f"step-{step:06d}"


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return trained tensors, moments, snapshots of the reference, and generators."""
    tensors = {}
    for room in ("trained", "reference"):
        if (checkpoint / room).exists():
            found = whole_tensors(checkpoint / room)
            tensors |= {f"{room}:{name}": tensor for name, tensor in found.items()}
    for file in checkpoint.glob("random_states_*.pkl"):
        tensors[file.name] = load(file)["torch_manual_seed"]
    return tensors


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the trained tensors by parameter name."""
    found = whole_tensors(checkpoint / "trained")
    return {name.removeprefix(POLICY): tensor for name, tensor in found.items() if name.startswith(POLICY)}


def save_whole(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """Save tensors from one process."""
    written(begin_writing(tensors, directory, None, is_sharded=False))


def whole_tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {name: kept.empty(None) for name, kept in read_index(directory).items()}
    read_into(tensors, directory)
    return tensors
