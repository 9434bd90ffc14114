"""A step with routing replay: every pass of the policy replays, and the reference routes for itself."""

from pathlib import Path

import msgspec
import numpy as np
import torch
from accelerate import Accelerator

from learner.forward.logprobs import token_logprobs
from learner.rollouts.rollout_group import RolloutGroup
from learner.run_inputs import RunInputs
from learner.training.distributed import my_batches
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import make_trainer
from learner.training.precompute import precompute_logprobs
from learner.training.step import advantages, train_on, trained_rows
from tests.learner.training.fixed_groups import VERSION, a_run, make_groups
from tests.zoo.families import save_model

SETTINGS = {
    "routing_replay": True, "gradient_checkpointing": True, "updates_per_batch": 2,
    "off_policy_correction": {"anchor": "proximal", "weight": "truncate"},
    "kl": {"coef": 0.1}, "reference": {"kind": "fixed"},
}  # fmt: skip


def with_random_experts(group: RolloutGroup, rng: np.random.Generator) -> RolloutGroup:
    def choices(count: int) -> np.ndarray:
        return rng.random((count, 2, 4)).argsort(-1)[..., :2].astype(np.uint8)

    completions = [
        msgspec.structs.replace(
            branch,
            experts=choices(len(branch.token_ids) - 1),
            prompt_experts=None if branch.prompt_token_ids is None else choices(len(branch.prompt_token_ids)),
        )
        for branch in group.completions
    ]
    prompt_experts = choices(len(group.prompt_token_ids))
    return msgspec.structs.replace(group, completions=completions, prompt_experts=prompt_experts)


def test_the_passes_before_and_in_a_step_replay_and_the_reference_does_not(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path)
    run = a_run(tmp_path, **SETTINGS)
    trainer = make_trainer(RunInputs(run), Accelerator(cpu=True), is_new=True)
    rng = np.random.default_rng(0)
    groups = [with_random_experts(group, rng) for group in make_groups(trainer.policy)]
    rows = trained_rows(groups, advantages(groups, run.learner), run.learner)
    batches = my_batches(trainer.accelerator, trainer.policy, rows, run.learner, "the step")
    for batch in precompute_logprobs(trainer, batches, VERSION, StepTimer()):
        assert batch.routing is not None and batch.proximal_logprobs_BT is not None
        assert batch.reference_logprobs_BT is not None
        with torch.no_grad():
            replayed_BT, own_BT = (
                token_logprobs(trainer.policy, batch.pack, run.learner.sampling.temperature, routing=routing)[0]
                for routing in (batch.routing, None)
            )
        assert float((replayed_BT - own_BT).abs().mean()) > 0.02
        torch.testing.assert_close(batch.proximal_logprobs_BT, replayed_BT)
        torch.testing.assert_close(batch.reference_logprobs_BT, own_BT)  # the policy has not moved yet
    metrics = train_on(trainer, groups, VERSION, StepTimer())
    assert metrics["routing/unreplayed_tokens"] == 0
    # Of 2 random experts of 4, five sixths are another pair than the router's.
    assert 0.7 < metrics["routing/changed_frac"] < 0.95
    assert metrics["loss/clipped_frac"] < 0.5 and metrics["optim/grad_norm"] > 0
