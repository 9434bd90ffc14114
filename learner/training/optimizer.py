"""The optimizer, the schedules of learning rate and KL coefficient, and the check that weights are finite.

The schedules depend only on the config, the version and the measured KL. A resume with another `steps` or number of
ranks therefore continues correctly. Every rank decides from values reduced over all ranks, so all decide alike.
Invariant: if weights are NaN or inf, `train_on` raises, so they are never sent to a server or saved.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from learner.config import KlConfig, OptimizerConfig
from learner.policy.host_adamw import HostAdamW
from learner.policy.sharding import NO_DECAY
from learner.policy.snapshot import local, reshard
from protocol.errors import ConfigError, SlipstreamError
from protocol.installation import install_command

MAX_RELATIVE_KL_ERROR = 0.2


class NotFiniteError(SlipstreamError):
    """Gradients or weights are NaN or inf, and continuing would not help."""


def make_optimizer(policy: nn.Module, settings: OptimizerConfig, learning_rate: float) -> torch.optim.Optimizer:
    """Return AdamW (arXiv 1711.05101), or AdamW with 8-bit moments (arXiv 2110.02861).

    AdamW runs as one fused kernel that reads and writes every tensor once; with its moments in host memory, one
    for each tensor. Weight decay applies to matrices only.

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
    if settings.offload is True:
        return HostAdamW(groups, lr=learning_rate, betas=betas)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def learning_rate(config: OptimizerConfig, version: int, num_steps: int) -> float:
    """Return the learning rate of the step that trains `version`.

    During warm-up, it is peak · (version + 1) / warmup_steps. Then, with x from 0 to 1 over the rest of the
    run:

        constant    peak
        linear      peak · (1 - x)
        cosine      peak · (1 + cos(π x)) / 2
    """
    if version < config.warmup_steps:
        return config.learning_rate * (version + 1) / config.warmup_steps
    progress = min(1.0, (version - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    match config.schedule:
        case "linear":
            return config.learning_rate * (1 - progress)
        case "cosine":
            return config.learning_rate * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate


def next_coef(config: KlConfig, coef: float, *, version: int, num_steps: int, measured_kl: float | None) -> float:
    """Return the KL coefficient of the step that trains `version`.

    `measured_kl` is the mean KL per token of the previous step, which used `coef`.

        linear  coef + (final_coef - coef) · version / (num_steps - 1)
        target  coef · (1 + clip(KL / target - 1, ±0.2) / horizon_steps)   (Ziegler et al., arXiv 1909.08593)
    """
    match config.schedule:
        case "linear":
            assert config.final_coef is not None
            return config.coef + (config.final_coef - config.coef) * min(1.0, version / max(1, num_steps - 1))
        case "target" if measured_kl is not None:
            assert config.target is not None
            error = min(max(measured_kl / config.target - 1, -MAX_RELATIVE_KL_ERROR), MAX_RELATIVE_KL_ERROR)
            return coef * (1 + error / config.horizon_steps)
    return coef


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


def _without_decay(policy: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters without weight decay.

    These are norms and biases (vectors), embeddings, also when tied to the head, and parameters that
    transformers marks.
    """
    for module in policy.modules():
        for parameter in module.parameters(recurse=False):
            is_marked = getattr(parameter, NO_DECAY, False)
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
