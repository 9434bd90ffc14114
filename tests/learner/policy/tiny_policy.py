"""The policy of `tiny:digits`, its batches and references, and an optimizer step that is only a random change."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from learner.forward.pack import Pack, pack
from learner.policy.lora import weights
from learner.policy.model import compute_in, load_policy
from protocol.model_files import resolve_model

TEMPERATURE = 0.7
PROMPT = (1, 2)
KINDS: dict[str, dict[str, Any]] = {
    "fixed": {"device": "cpu"},
    "every": {"every_steps": 2, "growth": 1.5, "max_every_steps": 4},
    "ema": {"every_steps": 2, "alpha": 0.3},
    "adaptive": {"kl_threshold": 0.1, "patience": 2},
    "mixture": {"every_steps": 2, "num_snapshots": 3},
}
"""Of references."""
METRICS = [
    {"reference/kl": kl, "reward/mean": reward}
    for kl, reward in [(0.2, 1.0), (0.05, 1.1), (0.2, 1.1), (0.2, 1.1), (0.0, 0.9), (0.2, 0.5), (0.2, 0.5), (0.2, 3.0)]
]
"""Of eight steps."""


def a_batch(token_ids: tuple[int, ...] = (3, 4, 5)) -> Pack:
    """PROMPT with one completion."""
    return pack([(np.array(PROMPT), [np.array(token_ids)])], torch.device("cpu"))


BATCHES = [a_batch(), a_batch((7, 7, 9, 3, 10))]


def tiny_policy(dtype: torch.dtype = torch.float32) -> Any:
    policy = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=False)
    compute_in(dtype, policy)
    return policy


def move(policy: nn.Module, seed: int, scale: float = 0.1) -> None:
    """Change all weights that are trained, sharded or not, in the same way."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            change = scale * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                change = distribute_tensor(change, parameter.device_mesh, parameter.placements)
            if parameter.requires_grad:
                parameter.add_(change)


def merged_tensors(policy: Any) -> dict[str, torch.Tensor]:
    """What is pushed of a policy that is whole, without gathering and renaming."""
    with torch.no_grad():
        return {name: weight.made_from(weight.tensor, *weight.low_rank) for name, weight in weights(policy).items()}
