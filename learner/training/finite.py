"""Whether gradients and weights are numbers. Between the backward pass and whoever takes the weights away.

Every rank decides alike, from what all of them have together. Invariant: weights that are no numbers leave `train_on` only as an
error, so they are never pushed and never saved.
"""

import torch
from accelerate import Accelerator
from torch import nn

from learner.policy.snapshot import local, reshard
from protocol.errors import SlipstreamError


class NotFiniteError(SlipstreamError):
    """Gradients or weights are no numbers, and to go on would not mend it."""


def require_finite_weights(accelerator: Accelerator, policy: nn.Module, told: str) -> None:
    """Raise NotFiniteError on every rank if a weight of any rank is no number; `told` says whose weights they are."""
    policy = accelerator.unwrap_model(policy)
    reshard(policy)
    broken = [name for name, parameter in policy.named_parameters() if not bool(local(parameter).isfinite().all())]
    num_broken = torch.tensor([float(len(broken))], device=accelerator.device)
    if not float(accelerator.reduce(num_broken, "sum")):
        return
    where = f"first in {broken[0]}" if broken else "on another rank"
    raise NotFiniteError(f"{told} hold values that are infinite or no numbers, {where}")
