"""The learning rate against transformers' schedulers, stepped along."""

import pytest
import torch
from transformers import get_scheduler

from learner.config import OptimizerConfig
from learner.training.optimizer import learning_rate

NUM_STEPS = 11


@pytest.mark.parametrize("warmup_steps", [0, 1, 4, NUM_STEPS])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_every_step_has_the_learning_rate_of_a_scheduler_but_none_is_0(schedule: str, warmup_steps: int) -> None:
    """transformers' own begins its warm-up with a step of 0; ours is one ahead of it until the peak."""
    config = OptimizerConfig(learning_rate=3e-4, schedule=schedule, warmup_steps=warmup_steps)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    scheduler = get_scheduler(name, optimizer, warmup_steps, num_training_steps=NUM_STEPS)
    rates = []
    for _ in range(NUM_STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    expected = [*rates[1:warmup_steps], *[config.learning_rate] * (warmup_steps > 0), *rates[warmup_steps:]]
    found = [learning_rate(config, version, NUM_STEPS) for version in range(NUM_STEPS)]
    assert found == pytest.approx(expected, abs=1e-12) and min(found) > 0
