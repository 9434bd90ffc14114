"""A snapshot of the policy's trainable parameters: taking it, seating it in the policy for a pass, writing and reading it.

Name → float32 tensor, nothing else: weights that are not trained are the policy's own, so a full fine-tune, LoRA and a
sharded policy (FSDP2, whose parameters are DTensors) go one way. Of a sharded parameter a snapshot holds this rank's shard.
The policy leaves `seated` with the bits it came with, and with its gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from protocol.errors import ConfigError

Snapshot = dict[str, torch.Tensor]


def reshard(policy: nn.Module) -> None:
    """After a pass FSDP2 may leave a module's gathered parameters in place of its shards, and would use them again."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def trainable(policy: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name; sharded ones as shards."""
    reshard(policy)
    return {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return the memory of a parameter on this rank, without its gradient."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def own_copy(parameter: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Copy what this rank has of a parameter in float32, to `device` or (None) where it is; into pinned memory if that is
    the host's and there is CUDA."""
    mine = local(parameter)
    device = mine.device if device is None else device
    is_pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(mine.shape, dtype=torch.float32, device=device, pin_memory=is_pinned).copy_(mine)


@contextmanager
def seated(policy: nn.Module, snapshot: Snapshot) -> Iterator[None]:
    """Let `policy` compute with the weights of `snapshot`. Not between a forward pass and its backward pass."""
    parameters = trainable(policy)
    displaced: Snapshot = {}
    try:
        for name, parameter in parameters.items():
            displaced[name] = _exchange(parameter, snapshot[name])
        torch.clear_autocast_cache()  # an enclosing autocast keeps casts of weights by parameter, not by content
        yield
    finally:
        trainable(policy)
        for name, tensor in displaced.items():
            _put_back(parameters[name], tensor)
        torch.clear_autocast_cache()


def _exchange(parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
    """Give the parameter other weights; return its own. A shard lies in memory that FSDP2 holds, so it is overwritten."""
    if not isinstance(parameter, DTensor):
        own = parameter.data
        parameter.data = tensor.to(own.device, own.dtype)
        return own
    own = local(parameter).clone()
    local(parameter).copy_(tensor)
    return own


def _put_back(parameter: nn.Parameter, own: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        local(parameter).copy_(own)
    else:
        parameter.data = own


def write_snapshot(snapshot: Snapshot, policy: nn.Module, path: Path, *, is_writer: bool) -> None:
    """Gather one parameter at a time, on every rank, and write the file on the one that `is_writer`."""
    tensors = {}
    for name, parameter in trainable(policy).items():
        gathered = _gathered(snapshot[name], parameter)
        if is_writer:
            tensors[name] = gathered.cpu()
    if is_writer:
        save_file(tensors, path)


def read_snapshot(path: Path, policy: nn.Module, device: torch.device | None) -> Snapshot:
    """Read a snapshot of `policy`, of which every rank keeps its shards. Raises ConfigError if it is another policy's."""
    parameters = trainable(policy)
    with safe_open(path, framework="pt") as file:
        if differing := sorted(parameters.keys() ^ file.keys()):
            raise ConfigError(
                f"{path} holds another policy: {', '.join(differing[:3])} {'is' if len(differing) == 1 else 'are'} "
                "trained in one and not in the other; resume with the model that wrote it"
            )
        return {
            name: own_copy(shared_out(file.get_tensor(name), parameter), device or local(parameter).device)
            for name, parameter in parameters.items()
        }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor, on every rank; any other is itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _gathered(tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    on_device = tensor.to(local(parameter).device)
    shape, stride = parameter.shape, parameter.stride()
    return whole(DTensor.from_local(on_device, mesh, placements, shape=shape, stride=stride))


def shared_out(tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Every rank has read the whole tensor, so each cuts its own shard out of it and nothing is sent."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
