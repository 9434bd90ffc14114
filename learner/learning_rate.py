"""The learning rate over a run. Pure: it depends on the config and the version alone, so a resume has nothing to restore, and
goes on right with other `steps` or another number of ranks.
"""

import math

from learner.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, version: int, num_steps: int) -> float:
    """The learning rate of the step that trains `version`.

    warm-up: peak · version / warmup_steps; then, with x from 0 to 1 over the rest of the run,
    constant: peak        linear: peak · (1 - x)        cosine: peak · (1 + cos(π x)) / 2
    """
    if version < config.warmup_steps:
        return config.learning_rate * version / config.warmup_steps
    progress = min(1.0, (version - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    match config.schedule:
        case "linear":
            return config.learning_rate * (1 - progress)
        case "cosine":
            return config.learning_rate * (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate
