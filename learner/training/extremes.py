"""The smallest and the largest ratio of a step to the behaviour policy, over micro-batches, updates and ranks.

Between the logprobs of a micro-batch and the metrics: what a sum over tokens hides, one token can be.
"""

import math

import torch
from accelerate import Accelerator

MAX_NATS = 20.0
"""As in the loss: beyond it a ratio is no different."""


class Extremes:
    """Since the last `take`."""

    def __init__(self) -> None:
        self._seen: list[torch.Tensor] = []
        """(-lowest, highest) of each micro-batch, where they were computed: to look at them now would wait for the GPU."""

    def see(self, log_ratio_BT: torch.Tensor) -> None:
        """Log-ratios, 0 outside the mask: a ratio of 1 is no extreme."""
        low, high = log_ratio_BT.float().nan_to_num().aminmax()
        self._seen.append(torch.stack([-low, high]))

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Metrics of all ranks, each of which calls this."""
        mine = torch.stack(self._seen or [torch.zeros(2, device=accelerator.device)]).amax(dim=0, keepdim=True)
        self._seen.clear()
        low, high = accelerator.gather(mine).amax(dim=0).clamp(max=MAX_NATS).tolist()
        return {"policy/ratio_min": math.exp(-low), "policy/ratio_max": math.exp(high)}
