"""AdamW whose moments stay in host memory, of which one parameter's are on the device at a time.

    for each parameter: moments to the device ─▶ torch's fused kernel ─▶ moments back to the host

The copies of a parameter take longer than its update, so a step is bound by the link to the host: 16 bytes for each
parameter, about a second for 3 billion parameters on PCIe 5. A sharded parameter moves its shard only.

Invariant: an update gives the same bits as torch's AdamW with fused = True.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from learner.policy.snapshot import as_shard, local
from protocol.weights.pinned import empty_in_host_memory

MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdamW(torch.optim.AdamW):
    """AdamW whose state has torch's names, so that checkpoints of both are alike."""

    def __init__(self, groups: Any, **settings: Any) -> None:
        super().__init__(groups, fused=True, **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. `closure` must be None."""
        assert closure is None
        devices = set()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
                    devices.add(parameter.device)
        for device in devices:
            if device.type == "cuda":  # the moments are read next by the host, or overwritten
                torch.cuda.current_stream(device).synchronize()

    def _update(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: empty_on_host(parameter).zero_() for name in MOMENTS}
        kept = [local(state[name]) for name in MOMENTS]
        on_device = [moment.to(parameter.device, non_blocking=True, copy=True) for moment in kept]
        beta1, beta2 = group["betas"]
        adamw(
            [local(parameter)],
            [local(gradient)],
            [on_device[0]],
            [on_device[1]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for moment, moved in zip(kept, on_device, strict=True):
            moment.copy_(moved, non_blocking=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the moments where they are, in host memory. torch's method would move them to the device."""
        super().load_state_dict(state_dict | {"state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] = state | {"step": state["step"].to(parameter.device)}


def empty_on_host(parameter: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized float32 tensor in host memory like this rank's part of a parameter, pinned with CUDA."""
    return as_shard(empty_in_host_memory(local(parameter).shape, torch.float32), parameter)


def keeps_on_host(optimizer: Any) -> bool:
    """Return whether the moments of an optimizer, prepared by accelerate or not, stay in host memory."""
    return isinstance(getattr(optimizer, "optimizer", optimizer), HostAdamW)
