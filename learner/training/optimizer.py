"""The configured optimizer, and checks that gradients and weights are finite.

Every rank decides from values reduced over all ranks, so all decide alike. Invariant: if weights are NaN or
inf, `train_on` raises, so they are never sent to a server or saved.
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
    """Return AdamW (arXiv 1711.05101), or AdamW with 8-bit moments (arXiv 2110.02861).

    AdamW runs as one fused kernel that reads and writes every tensor once. Weight decay applies to matrices
    only.

    Raises:
        ConfigError: The library for 8-bit moments is missing.
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
    """Yield the parameters without weight decay.

    These are norms and biases (vectors), embeddings, also when tied to the head, and parameters that
    transformers marks.
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
    """Gradients or weights are NaN or inf, and continuing would not help."""


def require_finite_weights(accelerator: Accelerator, policy: nn.Module, description: str, remedy: str) -> None:
    """Raise NotFiniteError on every rank if any rank has a NaN or inf weight.

    The error message names the weights by `description` and ends with `remedy`.
    """
    policy = accelerator.unwrap_model(policy)
    reshard(policy)
    broken = [name for name, parameter in policy.named_parameters() if not bool(local(parameter).isfinite().all())]
    num_broken = torch.tensor([float(len(broken))], device=accelerator.device)
    if not float(accelerator.reduce(num_broken, "sum")):
        return
    where = f"first in {broken[0]}" if broken else "on another rank"
    raise NotFiniteError(f"{description} contain NaN or inf ({where}); {remedy}")
