"""What a mean over tokens hides and one token can be: the extreme ratios of a step, and how much of its gradient one token is.

Between the loss of a micro-batch and the metrics, over micro-batches, updates and ranks.
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
        """(-lowest and highest log-ratio, largest pull) of each micro-batch, where they were computed: to look at them now would wait for
        the GPU."""
        self._pulls: list[torch.Tensor] = []
        """The sum of pulls of each micro-batch."""

    def see(self, log_ratio_BT: torch.Tensor, pull_BT: torch.Tensor) -> None:
        """Log-ratios to the behavior policy and |∂ loss / ∂ logprob|, both 0 outside the mask: a ratio of 1 is no extreme."""
        low, high = log_ratio_BT.float().nan_to_num().aminmax()
        pull_BT = pull_BT.float().nan_to_num()
        self._seen.append(torch.stack([-low, high, pull_BT.max()]))
        self._pulls.append(pull_BT.sum())

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """Return the metrics of all ranks, each of which calls this.

        loss/max_token_share: the largest share that one token has of Σ |∂ loss / ∂ logprob| over the tokens of the step.
        """
        nothing = torch.zeros(3, device=accelerator.device)
        mine = torch.stack(self._seen or [nothing]).amax(dim=0, keepdim=True)
        total = accelerator.reduce(torch.stack(self._pulls or [nothing[0]]).sum(), "sum")
        self._seen.clear()
        self._pulls.clear()
        low, high, pull = accelerator.gather(mine).amax(dim=0).tolist()
        metrics = {"policy/ratio_min": math.exp(-min(low, MAX_NATS)), "policy/ratio_max": math.exp(min(high, MAX_NATS))}
        return metrics | ({"loss/max_token_share": pull / float(total)} if total > 0 else {})
