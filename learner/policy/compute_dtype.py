"""The dtype in which the policy computes: its parameters are float32, its passes in the run's dtype, as the server's are.

    float32 parameters ─▶ a layer begins: cast ─▶ it computes as if it had been loaded in that dtype ─▶ it ends: put back

Between the loaded model and all that calls it. Invariant: whole on each rank, sharded by FSDP2 or loaded in bfloat16, the same
weights give the same logprobs; the cast is part of the graph, so gradients arrive in float32. Autocast would not do: under it the
sum that the layers add to stays float32, which it is neither in the server nor under FSDP2.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.modeling_layers import GradientCheckpointingLayer

MARK = "dtype_of_passes"


def compute_in(dtype: torch.dtype, policy: nn.Module, accelerator: Accelerator) -> None:
    """Let every later pass of `policy`, which accelerate has not prepared yet, compute in `dtype`. Buffers stay as they are."""
    setattr(policy, MARK, dtype)
    if accelerator.is_fsdp2:
        if dtype != torch.float32:
            mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            accelerator.state.fsdp_plugin.mixed_precision_policy = mixed
        return
    for module, owners in _parts(policy):
        part = _Part(owners, dtype)
        if part.needs_cast:
            module.register_forward_pre_hook(part.enter)
            # Always: a layer that is computed again for its gradient is left by an exception as soon as there is enough of it.
            module.register_forward_hook(part.leave, always_call=True)


def compute_dtype(policy: nn.Module) -> torch.dtype:
    """The dtype in which `policy`, prepared or not, computes."""
    marks = (
        getattr(module, MARK) for module in policy.modules() if hasattr(module, MARK)
    )  # DDP stands around the policy
    return next(marks, next(policy.parameters()).dtype)


def _parts(policy: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """A layer with all that is in it, for layers read weights of modules that they do not call; any other module alone."""
    of_layers: set[nn.Module] = set()
    for module in policy.modules():
        if module in of_layers:
            continue
        owners = list(module.modules()) if isinstance(module, GradientCheckpointingLayer) else [module]
        of_layers.update(owners)
        yield module, owners


class _Part:
    """Parameters that are cast together."""

    def __init__(self, owners: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places = [
            (owner, name)
            for owner in owners
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter.is_floating_point()
        ]
        self._parameters: list[nn.Parameter | None] = []
        """While the part runs, what is to be put back."""

    @property
    def needs_cast(self) -> bool:
        return any(cast(nn.Parameter, owner._parameters[name]).dtype != self._dtype for owner, name in self._places)

    def enter(self, module: nn.Module, args: Any) -> Any:
        self._parameters = [owner._parameters[name] for owner, name in self._places]
        # No Parameters but tensors that were computed from them: so they are a part of the graph, as FSDP2's are.
        for (owner, name), low in zip(self._places, _all_in(self._dtype, self._parameters), strict=True):
            owner._parameters[name] = cast(nn.Parameter, low)
        # Mamba casts what comes to its head to the dtype that its weight has outside of it.
        return (args[0].to(self._dtype), *args[1:]) if isinstance(module, nn.Linear) and args else None

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        for (owner, name), parameter in zip(self._places, self._parameters, strict=False):
            owner._parameters[name] = parameter
        self._parameters = []


def _all_in(dtype: torch.dtype, parameters: Sequence[Any]) -> list[torch.Tensor]:
    """All in `dtype`; those that are trained and are not yet, at once."""
    is_other = [parameter.requires_grad and parameter.dtype != dtype for parameter in parameters]
    lows = iter(
        _Cast.apply(dtype, *(parameter for parameter, other in zip(parameters, is_other, strict=True) if other))
    )
    return [next(lows) if other else parameter.to(dtype) for parameter, other in zip(parameters, is_other, strict=True)]


class _Cast(torch.autograd.Function):
    """Of several tensors by one node and, on a GPU, a few kernels: a layer has a dozen, and more launches than work would be theirs."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(_cast(tensors, [dtype] * len(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        places = [i for i, grad in enumerate(grads) if grad is not None]
        found = _cast([cast(torch.Tensor, grads[i]) for i in places], [ctx.dtypes[i] for i in places])
        by_place = dict(zip(places, found, strict=True))
        return None, *(by_place.get(i) for i in range(len(grads)))


def _cast(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    if found:
        torch._foreach_copy_(found, list(tensors))
    return found
