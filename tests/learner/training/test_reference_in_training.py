"""The reference of a trainer: logs, resumes, and the effect of a refresh on the optimizer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from learner.environments.episode import TokenSequence
from learner.rollouts.rollout_group import RolloutGroup
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import load_checkpoint
from learner.train import train
from learner.training.batch import micro_batch, trained_rows
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import make_trainer
from learner.training.precompute import precompute_logprobs
from learner.training.step import advantages, forward_backward
from protocol.errors import ConfigError
from tests.learner.checkpoints import save
from tests.learner.model_engine import tiny_server
from tests.learner.runs import make_run, metrics_of, seeded

ADAPTIVE = {"kind": "adaptive", "kl_threshold": 1e-9, "patience": 2, "reward_guard": False}
MIXTURE = {"kind": "mixture", "every_steps": 2, "num_snapshots": 2}
RESETTING = {"kind": "every", "every_steps": 3, "reset_optimizer": True}


def run_with(tmp_path: Path, reference: dict | None):
    settings = {} if reference is None else {"reference": reference, "kl": {"coef": 0.1}}
    return make_run(tmp_path, "tcp://127.0.0.1:1", **settings)


def trainer_with(accelerator: Accelerator, tmp_path: Path, reference: dict | None):
    return make_trainer(RunInputs(run_with(tmp_path, reference)), accelerator, is_new=True)


def test_metrics_name_the_reference_of_a_step_and_a_refresh_can_reset_the_optimizer(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    trainer = trainer_with(accelerator, tmp_path, RESETTING)
    policy = trainer.published.model
    for version, (of_reference, was_reset) in enumerate([(0, False), (0, False), (3, True), (3, False)], start=1):
        for parameter in policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        trainer.optimizer.step()
        metrics = trainer.after_step(version, {"reference/kl": 0.1})
        assert metrics == {
            "reference/kl_coef": 0.1, "reference/version": of_reference, "reference/refreshed": float(was_reset)
        }  # fmt: skip
        assert (len(trainer.optimizer.state) == 0) == was_reset


@pytest.mark.parametrize(("before", "now"), [(MIXTURE, ADAPTIVE), (MIXTURE, None), (None, ADAPTIVE)])
def test_a_checkpoint_with_another_kind_of_reference_is_rejected(
    accelerator: Accelerator, tmp_path: Path, before: dict | None, now: dict | None
) -> None:
    save(trainer_with(accelerator, tmp_path, before), tmp_path, 3)
    kinds = ["none" if settings is None else settings["kind"] for settings in (before, now)]
    with pytest.raises(ConfigError, match=f'learner.reference.kind = "{kinds[1]}" is not "{kinds[0]}", the kind in'):
        load_checkpoint(trainer_with(accelerator, tmp_path, now), tmp_path / "step-000003")


def test_a_run_with_coefficient_0_has_no_reference_and_logs_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    swept = {"reference": ADAPTIVE, "kl": {"coef": 0.0, "estimator": "k1", "place": "reward"}}
    with tiny_server() as server:
        run, plain = (make_run(tmp_path, server.endpoint, **seeded(), **more, steps=1) for more in (swept, {}))
        train(run, resume=False)
    assert run.in_effect() == plain
    (line,) = (message for message in caplog.messages if "have no effect" in message)
    assert "learner.reference.kind = 'adaptive' (needs kl.coef above 0)" in line
    assert not any(name.startswith("reference/") for step in metrics_of(run) for name in step)
    assert 'kind = "adaptive"' in (tmp_path / "run/config.toml").read_text()


def test_a_checkpoint_with_an_unreadable_state_is_an_error(accelerator: Accelerator, tmp_path: Path) -> None:
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / "state.json").write_text('{"step": 3, "version": 3}')
    with pytest.raises(ConfigError, match=r"step-000003/state\.json is damaged or from another version .*`reference`"):
        load_checkpoint(trainer_with(accelerator, tmp_path, None), tmp_path / "step-000003")


def scored_by_the_reference() -> RolloutGroup:
    branch = TokenSequence(
        token_ids=np.array([3, 0], np.int32), behavior_logprobs=np.zeros(2, np.float32), versions=[(0, 2)],
        finish_reason="stop", reference_logprobs=np.full(2, -0.5, np.float32),
    )  # fmt: skip
    return RolloutGroup(
        group_id="0.0", slot=0, prompt_token_ids=np.array([1], np.int32), completions=[branch, branch],
        rewards_G=[0.0, 1.0], rewards_by_function={"share_right": [0.0, 1.0]}, entered_version=0,
    )  # fmt: skip


def test_rewards_that_are_only_logged_give_no_advantage_and_the_kl_needs_none(tmp_path: Path) -> None:
    group = scored_by_the_reference()
    distilled = {"kl": {"coef": 1.0, "place": "advantage"}, "reference": {"kind": "fixed"}}
    for reward, expected in (({"only_logged": True}, [0.0, 0.0]), ({}, [-0.7070, 0.7070])):
        functions = {"functions": ["share_right"]}
        config = make_run(tmp_path, "tcp://127.0.0.1:1", reward=functions | reward, **distilled).learner
        found = advantages([group], config)
        assert found == [[pytest.approx([advantage], abs=1e-4) for advantage in expected]]
        assert len(trained_rows([group], found, config)) == 2
    batch = micro_batch(trained_rows([group], found, config), torch.device("cpu"))
    assert batch.reference_logprobs_BT is not None and batch.reference_logprobs_BT.tolist() == [[-0.5, -0.5]] * 2


@pytest.mark.parametrize("place", ["loss", "advantage", "reward"])
def test_ranks_with_and_without_rows_reduce_the_same_sums(accelerator: Accelerator, tmp_path: Path, place: str) -> None:
    run = make_run(
        tmp_path, "tcp://127.0.0.1:1", kl={"coef": 0.1, "place": place}, advantage={"scale": "none"},
        reference={"kind": "fixed", "endpoint": "tcp://127.0.0.1:2"},
    )  # fmt: skip
    trainer = make_trainer(RunInputs(run), accelerator, is_new=True)
    rows = trained_rows([group := scored_by_the_reference()], advantages([group], run.learner), run.learner)
    of_ranks = []
    for rows_of_rank in (rows, []):
        batches = precompute_logprobs(trainer, [micro_batch(rows_of_rank, accelerator.device)], 0, StepTimer())
        of_ranks.append(forward_backward(trainer, batches, 0, is_first_update=True).keys())
    assert of_ranks[0] == of_ranks[1] and ("reference_kl" in of_ranks[0]) == (place != "reward")
