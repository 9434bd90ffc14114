"""The weight of the entropy bonus: how a target moves it, that a step uses it, and that a resume keeps it."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from accelerate import Accelerator

from learner.config import LossConfig
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import load_checkpoint
from learner.training.entropy_control import EntropyControl
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import make_trainer
from learner.training.step import train_on
from tests.learner.algorithm.rivals import Trl
from tests.learner.checkpoints import save
from tests.learner.training.fixed_groups import VERSION, make_groups, make_moved_trainer, make_run

ENTROPIES = [2.0, 0.9, 0.8, 0.7, 1.0, 0.6, 1.5, 1.4, 1.3, 1.2, 0.5]
TARGET = LossConfig(entropy_coef=0.1, entropy_target=1.0, entropy_coef_step=0.05, max_entropy_coef=0.2)


def weights(config: LossConfig, entropies: list[float | None]) -> list[float]:
    """Return the weight of each step, of steps that measure these entropies."""
    control, used = EntropyControl(coef=config.entropy_coef), []
    for entropy in entropies:
        used.append(control.weight(config))
        control = control.after_step(config, entropy)
    return used


def test_the_weight_rises_below_the_target_falls_above_it_and_applies_only_below() -> None:
    # after each step, the coefficient is 0.05 0.1 0.15 0.2 0.2 (at most) 0.2 0.15 0.1 0.05 0.0
    expected = [0.0, 0.0, 0.1, 0.15, 0.2, 0.2, 0.2, 0.0, 0.0, 0.0, 0.0]
    assert weights(TARGET, list(ENTROPIES)) == pytest.approx(expected)


def test_a_step_without_tokens_leaves_the_weight_as_it_is() -> None:
    assert weights(TARGET, [0.5, None, None]) == pytest.approx([0.0, 0.15, 0.15])


def test_without_a_target_the_weight_is_constant() -> None:
    assert weights(LossConfig(entropy_coef=0.25), [0.1, 5.0, None]) == [0.25] * 3


def test_the_weights_are_those_of_trl() -> None:
    """The bonus of a step is policy loss - loss, and here the mean entropy times the weight."""
    pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0")
    settings = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 1.0, "entropy_coef_delta": 0.05,
                "entropy_coef_max": 0.2}  # fmt: skip
    logprobs_BT = torch.zeros(2, 3, requires_grad=True)
    trainer = Trl("bnpo", settings).make(logprobs_BT, None)
    batch = {name: torch.zeros(2, 3, dtype=torch.long) for name in ("prompt_ids", "completion_ids")}
    batch |= {"prompt_mask": torch.ones(2, 3), "completion_mask": torch.ones(2, 3), "advantages": torch.zeros(2)}
    used = []
    for entropy in ENTROPIES:
        entropies_BT = torch.full((2, 3), entropy)
        trainer._get_per_token_logps_and_entropies = lambda *_, e=entropies_BT, **__: (logprobs_BT, e, None)
        used.append(-float(trainer._compute_loss(trainer.model, batch).detach()) / entropy)
    assert weights(TARGET, list(ENTROPIES)) == pytest.approx(used)


def test_a_step_below_the_target_trains_like_one_with_that_constant_weight(accelerator: Accelerator) -> None:
    trained = []
    for loss in ({"entropy_coef": 0.3}, {"entropy_target": 1.0}):
        trainer = make_moved_trainer(make_run(loss=loss), accelerator)
        groups = make_groups(trainer.policy)
        groups[0] = msgspec.structs.replace(groups[0], rewards_G=[1.0] * 4)  # no signal, but an entropy
        trainer.entropy = EntropyControl(coef=0.3, entropy=0.9)
        train_on(trainer, groups, VERSION, StepTimer())
        trained.append(torch.cat([one.detach().flatten() for one in trainer.policy.parameters()]))
    assert torch.equal(*trained)


def test_a_resumed_run_continues_with_the_weight_that_it_had(accelerator: Accelerator, tmp_path: Path) -> None:
    run = make_run(loss=msgspec.structs.asdict(msgspec.structs.replace(TARGET, entropy_target=9.0)))
    trainer = make_moved_trainer(run, accelerator)
    groups = make_groups(trainer.policy)
    used = []
    for version in (VERSION, VERSION + 1):
        metrics = train_on(trainer, groups, version, StepTimer())
        used.append(trainer.after_step(version + 1, metrics)["loss/entropy_coef"])
    assert used == pytest.approx([0.0, 0.15]) and trainer.entropy.weight(run.learner.loss) == pytest.approx(0.2)
    path = save(trainer, tmp_path, VERSION + 2)
    resumed = make_trainer(RunInputs(run), accelerator, is_new=False)
    assert load_checkpoint(resumed, path).entropy == resumed.entropy == trainer.entropy
    state = json.loads((path / "state.json").read_text())
    del state["entropy"]  # as an earlier version wrote it
    (path / "state.json").write_text(json.dumps(state))
    older = make_trainer(RunInputs(run), accelerator, is_new=False)
    load_checkpoint(older, path)
    assert older.entropy == EntropyControl(coef=0.1)
