"""What a checkpoint keeps of a sharded policy and its optimizer, in the files that accelerate writes of a whole one.

So a run goes on with more ranks or fewer, sharded or not. Not accelerate's own way: it takes a step of the optimizer to save
one that has not taken any. Every rank calls both functions. Memory: one gathered tensor at a time on each rank, and on rank 0
the file that is being written, in the host's memory.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.utils.other import load
from torch import nn

from learner.policy.snapshot import local, read_snapshot, shared_out, trainable, whole, write_snapshot

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.bin"

Moments = dict[int, dict[str, Any]]
"""What the optimizer keeps of each parameter, by its place: tensors of the parameter's shape, and others."""


def save_sharded(
    accelerator: Accelerator, policy: nn.Module, optimizer: torch.optim.Optimizer, directory: Path
) -> None:
    """Raises OSError, SafetensorError or RuntimeError if it cannot be written."""
    shards = {name: local(parameter) for name, parameter in trainable(policy).items()}
    write_snapshot(shards, policy, directory / MODEL_FILE, is_writer=accelerator.is_main_process)
    state, moments = optimizer.state_dict(), Moments()
    for place, tensors in state["state"].items():
        for name, tensor in tensors.items():
            gathered = whole(tensor)
            if accelerator.is_main_process:
                moments.setdefault(place, {})[name] = gathered.cpu()
    if accelerator.is_main_process:
        torch.save(state | {"state": moments}, directory / OPTIMIZER_FILE)
    save_accelerator_state(str(directory), [], [], [], [], accelerator.process_index, step=0)


def load_sharded(
    accelerator: Accelerator, policy: nn.Module, optimizer: torch.optim.Optimizer, directory: Path
) -> None:
    """Raises ConfigError if the checkpoint is of another model, OSError, SafetensorError or RuntimeError if it is damaged."""
    parameters = trainable(policy)
    for name, shard in read_snapshot(directory / MODEL_FILE, policy, None).items():
        local(parameters[name]).copy_(shard)
    state = load(directory / OPTIMIZER_FILE, map_location="cpu", mmap=True)
    places = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state["state"] = {
        place: {
            name: shared_out(tensor, places[place]) if tensor.shape == places[place].shape else tensor
            for name, tensor in tensors.items()
        }
        for place, tensors in state["state"].items()
    }
    optimizer.load_state_dict(state)
    load_accelerator_state(str(directory), [], [], [], [], accelerator.process_index)
