"""Groups of random completions with behavior logprobs near the tiny model's own, of several versions; always the
same."""

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor, distribute_tensor

from learner.config import LearnerRun
from learner.environments.episode import TokenSequence
from learner.forward.logprobs import sequences_logprobs
from learner.rollouts.rollout_group import RolloutGroup
from learner.run_inputs import RunInputs
from learner.training.policy_trainer import PolicyTrainer, make_trainer

VERSION = 5
"""The learner's; the groups are of versions 1 to 5."""
MAX_TOKENS = 8


def make_run(**learner: Any) -> LearnerRun:
    settings = {
        "steps": 10,
        "max_staleness": 4,
        "data": {"task": "reverse", "num_digits": 4, "num_prompts": 8},
        "reward": {"functions": ["share_right"]},
        "sampling": {"group_size": 4, "max_tokens": MAX_TOKENS},
        "optimizer": {"learning_rate": 0.1, "max_grad_norm": 1e9},
    }
    shared = {"model": "tiny:digits", "dtype": "float32", "run_dir": "unused"}
    return msgspec.convert(shared | {"learner": settings | learner}, LearnerRun)


def a_run(model: Path | str = "tiny:digits", **learner: Any) -> LearnerRun:
    """A gentler one, in several passes, of any model."""
    settings = {"micro_batch_tokens": 20, "optimizer": {"learning_rate": 1e-3}} | learner
    return msgspec.structs.replace(make_run(**settings), model=str(model))


def make_moved_trainer(run: LearnerRun, accelerator: Accelerator) -> PolicyTrainer:
    """A trainer whose policy has moved away from its reference, with plain gradient descent for an optimizer."""
    torch.manual_seed(0)
    trainer = make_trainer(RunInputs(run), accelerator, is_new=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.policy.parameters():
            change = 0.05 * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                change = distribute_tensor(change, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.add_(change)
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=0.1)
    return trainer


def make_groups(
    policy: torch.nn.Module, num_groups: int = 3, num_completions: int = 4, prompt_tokens: tuple[int, int] = (2, 6)
) -> list[RolloutGroup]:
    """Prompts and completions of random length; behavior logprobs off the policy's by noise of 0.3; some are
    truncated."""
    generator = random.Random(3)
    groups = []
    for slot in range(num_groups):
        prompt = [generator.randrange(1, 16) for _ in range(generator.randrange(*prompt_tokens))]
        completions = []
        for _ in range(num_completions):
            length = generator.choice([1, 3, 5, MAX_TOKENS])
            tokens = [generator.randrange(1, 16) for _ in range(length)]
            logprobs = sequences_logprobs(policy, [prompt + tokens], torch.device("cpu")).numpy()[len(prompt) - 1 :]
            noise = np.array([generator.gauss(0, 0.3) for _ in tokens], np.float32)
            first = generator.randrange(0, length)
            old = generator.randrange(1, VERSION)
            completion = TokenSequence(
                token_ids=np.array(tokens, np.int32),
                behavior_logprobs=logprobs + noise,
                versions=[(old, first), (old + 1, length - first)] if first else [(old + 1, length)],
                finish_reason="length" if length == MAX_TOKENS else "stop",
            )
            completions.append(completion)
        rewards = [generator.choice([0.0, 0.5, 1.0]) for _ in completions]
        rewards[0], rewards[1] = 0.0, 1.0
        group = RolloutGroup(
            group_id=f"{slot}.0",
            slot=slot,
            prompt_token_ids=np.array(prompt, np.int32),
            completions=completions,
            rewards_G=list(rewards),
            rewards_by_function={"share_right": list(rewards)},
            entered_version=1,
        )
        groups.append(group)
    return groups
