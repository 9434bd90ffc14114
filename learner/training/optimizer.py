"""The optimizer that a config asks for, and whether its gradients and weights are finite.

Every rank decides alike, from what all of them have together. Invariant: weights that are NaN or inf leave `train_on` only as an error,
so they are never pushed and never saved.
"""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from learner.config import OptimizerConfig
from learner.policy.snapshot import local, reshard
from protocol.errors import ConfigError, SlipstreamError
from protocol.installation import install_command


def make_optimizer(policy: nn.Module, settings: OptimizerConfig, learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW (arXiv 1711.05101) over the policy's trainable parameters, as one kernel that reads and writes every tensor once;
    or with moments of 8 bits (arXiv 2110.02861). Weight decay applies to matrices alone.

    Raises ConfigError if the library for 8 bits is missing.
    """
    exempt = {id(parameter) for parameter in _without_decay(policy)}
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if id(one) not in exempt], "weight_decay": settings.weight_decay},
        {"params": [one for one in trained if id(one) in exempt], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (settings.beta1, settings.beta2)
    if settings.kind == "adamw_8bit":
        return _adamw_8bit()(groups, lr=learning_rate, betas=betas)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def _without_decay(policy: nn.Module) -> Iterator[nn.Parameter]:
    """Yield what decay would only distort: norms and biases (vectors), embeddings, also where the head shares one, and what a family
    of transformers marks itself.
    """
    for module in policy.modules():
        for parameter in module.parameters(recurse=False):
            is_marked = getattr(parameter, "_no_weight_decay", False)
            if parameter.dim() < 2 or is_marked or isinstance(module, nn.Embedding):
                yield parameter


def _adamw_8bit() -> Any:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f'learner.optimizer.kind = "adamw_8bit" needs bitsandbytes ({error}): '
            f'{install_command("adamw-8bit")}, or set kind to "adamw"'
        ) from error
    return AdamW8bit


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
