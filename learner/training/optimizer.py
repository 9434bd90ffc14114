"""The optimizer that a config asks for: the run's, and the one that a warm start has for itself."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from learner.config import OptimizerConfig
from protocol.errors import ConfigError


def make_optimizer(
    parameters: Iterable[nn.Parameter], settings: OptimizerConfig, learning_rate: float
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) of the parameters that are trained, as one kernel that reads and writes every tensor once; or with
    moments of 8 bits (arXiv 2110.02861). Raises ConfigError if the library for those is missing.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    betas = (settings.beta1, settings.beta2)
    if settings.kind == "adamw_8bit":
        return _adamw_8bit()(trained, lr=learning_rate, betas=betas, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(trained, lr=learning_rate, betas=betas, weight_decay=settings.weight_decay, fused=True)


def _adamw_8bit() -> Any:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f'learner.optimizer.kind = "adamw_8bit" needs bitsandbytes ({error}): pip install "slipstream-rl[adamw-8bit]", or set '
            'kind to "adamw"'
        ) from error
    return AdamW8bit
