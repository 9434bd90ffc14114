"""Take snapshots of the policy's trainable parameters, and swap them into the policy for a pass.

A snapshot maps names to tensors, or to this rank's shards if the policy is sharded. All other weights are the
policy's own. A full fine-tune, LoRA and a sharded policy (FSDP2, whose parameters are DTensors) therefore
work alike.

Invariant: the policy leaves `seated` with its original parameters and their gradients.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from learner.policy.model import compute_dtype
from protocol.weights.pinned import empty_in_host_memory

Snapshot = dict[str, torch.Tensor]


def reshard(policy: nn.Module) -> None:
    """Replace gathered parameters by their shards.

    After a pass, FSDP2 may leave gathered parameters in their place, and would use them again.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def trainable(policy: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name; sharded ones as shards."""
    reshard(policy)
    return {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Return the memory of a parameter on this rank, without its gradient."""
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def own_copy(parameter: torch.Tensor, device: torch.device | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Copy this rank's part of a parameter.

    `device`: None keeps the device. In host memory, the copy is pinned if CUDA is available.
    """
    mine = local(parameter)
    device = mine.device if device is None else device
    if device.type == "cpu":
        return empty_in_host_memory(mine.shape, dtype).copy_(mine)
    return torch.empty(mine.shape, dtype=dtype, device=device).copy_(mine)


@contextmanager
def seated(policy: nn.Module, snapshot: Snapshot) -> Iterator[None]:
    """Let `policy` compute with the weights of `snapshot`.

    Do not use this between a forward pass and its backward pass.
    """
    homes = _homes(policy)
    with ExitStack() as unseat:
        for name, parameter in trainable(policy).items():
            if isinstance(parameter, DTensor):  # FSDP2 holds the shard's memory: overwrite it
                mine = local(parameter)
                unseat.callback(mine.copy_, mine.clone())
                mine.copy_(snapshot[name])
            else:
                weights = snapshot[name].to(parameter.device, compute_dtype(policy))
                stand_in = nn.Parameter(weights, requires_grad=False)
                for module, key in homes[id(parameter)]:
                    unseat.callback(module._parameters.__setitem__, key, parameter)
                    module._parameters[key] = stand_in
        unseat.callback(reshard, policy)
        yield


def _homes(policy: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the modules of each parameter, by its id; a tied one has several."""
    homes: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in policy.modules():
        for key, parameter in module._parameters.items():
            homes[id(parameter)].append((module, key))
    return homes


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor on every rank; return any other unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def as_shard(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor as this rank's shard of the whole, sharded like `parameter`.

    The tensor may be on any device; no memory is copied.
    """
    if not isinstance(parameter, DTensor):
        return tensor
    # `from_local` would move the tensor to the parameter's device.
    return DTensor(tensor, parameter._spec, requires_grad=False)
