"""The gradient of a step in every case of plain_step.py, for the tests that split the step."""

from typing import Any

import torch
from accelerate import Accelerator

from learner.policy.snapshot import whole
from learner.rollouts.rollout_group import RolloutGroup
from learner.training.batch import trained_rows
from learner.training.distributed import my_batches
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import PolicyTrainer
from learner.training.precompute import precompute_logprobs
from learner.training.step import advantages, apply_kl_penalty, forward_backward
from tests.learner.training.fixed_groups import VERSION, make_groups, make_moved_trainer, make_run
from tests.learner.training.plain_step import CASES, FIXED


def gradient_of(trainer: PolicyTrainer, groups: list[RolloutGroup]) -> torch.Tensor:
    """The gradient of the first update, as one vector."""
    config = trainer.config
    if config.kl.place == "reward":
        groups, _ = apply_kl_penalty(trainer, groups, VERSION, StepTimer())
    rows = trained_rows(groups, advantages(groups, config), config)
    batches = my_batches(trainer.accelerator, trainer.policy, rows, config, "the step")
    batches = precompute_logprobs(trainer, batches, VERSION, StepTimer())
    forward_backward(trainer, batches, VERSION, is_first_update=True)
    gradient = torch.cat([whole(parameter.grad).flatten() for parameter in trainer.policy.parameters()])
    trainer.optimizer.zero_grad()
    return gradient


def gradients(
    accelerator: Accelerator, *, micro_batch_tokens: int, is_turned: bool = False, **shared: Any
) -> dict[str, torch.Tensor]:
    """Of nine rows: of two ranks one has more than the other."""
    trainers = [
        make_moved_trainer(make_run(**settings, **shared), accelerator)
        for settings in ({}, FIXED | {"kl": {"coef": 0.5}})
    ]
    groups = make_groups(accelerator.unwrap_model(trainers[0].policy), num_completions=3)
    found = {}
    for name, (settings, _) in CASES.items():
        trainer = trainers["kl" in settings]
        trainer.run = make_run(**settings | {"micro_batch_tokens": micro_batch_tokens}, **shared)
        trainer.kl_coef = trainer.config.kl.coef
        found[name] = gradient_of(trainer, groups[::-1] if is_turned else groups)
    return found
