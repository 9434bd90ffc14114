"""The gradient of a step under many configs, for the tests that split the step."""

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

GEOMETRIC_MASK = {
    "anchor": "proximal",
    "proximal": "log_linear",
    "weight": "mask",
    "granularity": "geometric",
    "max_weight": 1.05,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo per sequence": {"loss": {"objective": "gspo", "normalization": "sequence"}},
    "cispo": {"loss": {"objective": "cispo"}},
    "sapo per sequence": {"loss": {"objective": "sapo", "normalization": "sequence"}},
    "dppo": {"loss": {"objective": "dppo", "normalization": "dr_grpo"}},
    "reinforce, truncated": {"loss": {"objective": "reinforce"}, "off_policy_correction": {"weight": "truncate"}},
    "decoupled": {"off_policy_correction": {"anchor": "proximal", "weight": "truncate"}, "updates_per_batch": 2},
    "log-linear, geometric mask": {"off_policy_correction": GEOMETRIC_MASK, "loss": {"normalization": "dr_grpo"}},
    "sequence masks": {
        "off_policy_correction": {"weight": "mask", "granularity": "sequence", "max_weight": 1.5, "sequence_mask": 0.1}
    },
    "stale tokens count less": {"off_policy_correction": {"max_token_staleness": 1, "stale_token_weight": 0.25}},
    "top entropy and bonus": {"loss": {"top_entropy_frac": 0.3, "entropy_coef": 0.1}},
    "kl in the loss": {"kl": {"coef": 0.3, "importance_weighted": True}, "reference": {"kind": "fixed"}},
    "kl in the reward": {
        "kl": {"coef": 0.3, "place": "reward"},
        "reference": {"kind": "fixed"},
        "advantage": {"scale": "batch"},
    },
    "truncated left out, batch deviation": {"loss": {"mask_truncated": True}, "advantage": {"scale": "batch"}},
}


def gradient_of(trainer: PolicyTrainer, groups: list[RolloutGroup]) -> torch.Tensor:
    """The gradient of the first update, as one vector."""
    config = trainer.config
    if config.kl.place == "reward":
        groups, _ = apply_kl_penalty(trainer, groups, VERSION, StepTimer())
    rows = trained_rows(groups, advantages(groups, config), config)
    batches = my_batches(trainer.accelerator, trainer.policy, rows, config, "the step")
    batches = precompute_logprobs(trainer, batches, StepTimer())
    forward_backward(trainer, batches, VERSION, is_first_update=True)
    gradient = torch.cat([whole(parameter.grad).flatten() for parameter in trainer.policy.parameters()])
    trainer.optimizer.zero_grad()
    return gradient


def gradients(accelerator: Accelerator, *, micro_batch_tokens: int, is_turned: bool = False) -> dict[str, torch.Tensor]:
    """Of nine rows under every config: of two ranks one has more than the other."""
    trainers = [make_moved_trainer(make_run(**CONFIGS[name]), accelerator) for name in ("grpo", "kl in the loss")]
    groups = make_groups(accelerator.unwrap_model(trainers[0].policy), num_completions=3)
    found = {}
    for name, settings in CONFIGS.items():
        trainer = trainers["kl" in settings]
        trainer.run = make_run(**settings, micro_batch_tokens=micro_batch_tokens)
        found[name] = gradient_of(trainer, groups[::-1] if is_turned else groups)
    return found
