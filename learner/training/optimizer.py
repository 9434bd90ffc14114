"""The optimizer that a config asks for: the run's, and the one that a warm start has for itself."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from learner.config import OptimizerConfig
from protocol.errors import ConfigError
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
