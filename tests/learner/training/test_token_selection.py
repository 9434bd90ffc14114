"""Tokens that Clip-Cov and KL-Cov pick: by the paper's rule, over the whole step, whatever its micro-batches."""

import msgspec
import pytest
import torch
from accelerate import Accelerator

from learner.algorithm.objectives import PICKS, StepTokens
from learner.config import LossConfig
from learner.training.batch import micro_batch, trained_rows
from learner.training.distributed import my_batches
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import PolicyTrainer
from learner.training.precompute import precompute_logprobs
from learner.training.step import advantages
from tests.learner.training.fixed_groups import VERSION, make_groups, make_moved_trainer, make_run

BAND = {"objective": "clip_cov", "cov_low": 0.2, "cov_high": 2.0}


def step_of(num_tokens: int) -> StepTokens:
    generator = torch.Generator().manual_seed(0)
    return StepTokens(
        log_ratio_N=torch.randn(num_tokens, generator=generator) / 5,
        logprobs_N=torch.randn(num_tokens, generator=generator) - 2,
        advantages_N=torch.randn(num_tokens, generator=generator),
        random_N=torch.rand(num_tokens, generator=generator, dtype=torch.float64),
    )


def covariance(step: StepTokens) -> list[float]:
    logprobs, advantages = step.logprobs_N.tolist(), step.advantages_N.tolist()
    mean_p, mean_a = sum(logprobs) / len(logprobs), sum(advantages) / len(advantages)
    return [(p - mean_p) * (a - mean_a) for p, a in zip(logprobs, advantages, strict=True)]


def test_kl_cov_picks_the_share_of_highest_covariance() -> None:
    step = step_of(1000)
    picked = PICKS["kl_cov"](step, LossConfig(objective="kl_cov", cov_frac=0.0255)).tolist()
    floor = sorted(covariance(step))[-25]  # int(1000 · 0.0255)
    assert picked == [value >= floor for value in covariance(step)]


@pytest.mark.parametrize("objective", PICKS)
def test_a_small_step_picks_one_token(objective: str) -> None:
    config = LossConfig(objective=objective, **({"cov_low": -9.0} if objective == "clip_cov" else {}))
    assert PICKS[objective](step_of(20), config).sum() == 1


def test_clip_cov_picks_at_random_among_unclipped_tokens_in_the_band() -> None:
    step, config = step_of(1000), LossConfig(**BAND, cov_frac=0.05)
    candidates = [
        0.2 < value < 2 and not (x > 0.1823 if a > 0 else x < -0.2231)  # log 1.2, log 0.8
        for value, x, a in zip(covariance(step), step.log_ratio_N.tolist(), step.advantages_N.tolist(), strict=True)
    ]
    counts = torch.zeros(1000)
    for seed in range(200):
        random_N = torch.rand(1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        picked_N = PICKS["clip_cov"](msgspec.structs.replace(step, random_N=random_N), config)
        assert picked_N.sum() == 50 and not (picked_N & ~torch.tensor(candidates)).any()
        counts += picked_N
    expected = 200 * 50 / sum(candidates)
    assert ((counts[torch.tensor(candidates)] - expected).abs() < 6 * expected**0.5).all()
    everything = PICKS["clip_cov"](step, msgspec.structs.replace(config, cov_frac=1.0))
    assert everything.tolist() == candidates


def picks_of(trainer: PolicyTrainer, groups: list, version: int, **learner: object) -> list[list[bool]]:
    """Return the picks of a step, by branch."""
    trainer.run = make_run(loss=BAND | {"cov_frac": 0.1}, **learner)
    rows = trained_rows(groups, advantages(groups, trainer.config), trainer.config)
    batches = my_batches(trainer.accelerator, trainer.policy, rows, trainer.config, "the step")
    batches = precompute_logprobs(trainer, batches, version, StepTimer())
    found = {
        episode: picked_T[mask_T].tolist()
        for batch in batches
        for episode, picked_T, mask_T in zip(batch.episodes_B.tolist(), batch.picked_BT, batch.mask_BT, strict=True)
    }
    return [found[episode] for episode in sorted(found)]


def test_a_random_pick_depends_on_the_version_and_not_on_micro_batches(accelerator: Accelerator) -> None:
    trainer = make_moved_trainer(make_run(), accelerator)
    groups = make_groups(trainer.policy)
    whole = picks_of(trainer, groups, VERSION, micro_batch_tokens=1000)
    num_tokens = sum(map(len, whole))
    assert sum(map(sum, whole)) == int(0.1 * num_tokens)
    assert picks_of(trainer, groups, VERSION, micro_batch_tokens=15) == whole
    assert picks_of(trainer, groups, VERSION + 1, micro_batch_tokens=1000) != whole


@pytest.mark.parametrize("loss", [*({"objective": objective} for objective in PICKS), {"top_entropy_frac": 0.5}])
def test_a_step_without_trained_tokens_selects_none(accelerator: Accelerator, loss: dict[str, object]) -> None:
    trainer = make_moved_trainer(make_run(loss=loss), accelerator)
    (batch,) = precompute_logprobs(trainer, [micro_batch([], accelerator.device)], VERSION, StepTimer())
    selected_BT = batch.picked_BT if batch.policy_mask_BT is None else batch.policy_mask_BT
    assert selected_BT is not None and selected_BT.tolist() == [[False]]
