"""Learning rate and KL coefficient of a step. Pure.

They depend only on the config, the version and the measured KL. A resume with another `steps` or number of
ranks therefore continues correctly.
"""

import math

from learner.config import KlConfig, OptimizerConfig

MAX_RELATIVE_ERROR = 0.2


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
            error = min(max(measured_kl / config.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
            return coef * (1 + error / config.horizon_steps)
    return coef
