"""A NaN gradient skips one update and never reaches the weights; NaN weights never leave the learner."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from learner.run_inputs import RunInputs
from learner.training.metrics import StepTimer
from learner.training.optimizer import NotFiniteError
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from learner.training.step import train_on
from protocol.model_files import resolve_model
from tests.learner.training.fixed_groups import VERSION, make_groups, make_moved_trainer, make_run


def weights_of(trainer: PolicyTrainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.policy.parameters()]


def poison(trainer: PolicyTrainer) -> Any:
    """Make the layers return NaN until the handle's `remove`."""
    norm: Any = trainer.policy.transformer.ln_f
    return norm.register_forward_hook(lambda module, inputs, output: output * math.nan)


def is_unchanged(trainer: PolicyTrainer, before: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, weights_of(trainer), before))


KL = {"reference": {"kind": "fixed"}, "kl": {"coef": 0.3, "schedule": "target", "target": 0.01}}


def test_an_update_with_a_nan_gradient_is_skipped_counted_and_logged(
    accelerator: Accelerator, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_moved_trainer(make_run(**KL), accelerator)
    groups, before = make_groups(trainer.policy), weights_of(trainer)
    poisoned = poison(trainer)
    with caplog.at_level(logging.WARNING):
        metrics = train_on(trainer, groups, VERSION, StepTimer())
    assert is_unchanged(trainer, before)
    assert metrics["optim/skipped_updates"] == 1 and all(map(math.isfinite, metrics.values()))
    assert "optim/grad_norm" not in metrics and "loss/policy" not in metrics
    assert "skipping the update of step 6: the gradient norm is nan" in caplog.text
    coef = trainer.kl_coef
    trainer.after_step(VERSION + 1, metrics)
    assert trainer.kl_coef == coef, "a missing measurement must not change the coefficient"
    poisoned.remove()
    metrics = train_on(trainer, groups, VERSION + 1, StepTimer())
    assert metrics["optim/skipped_updates"] == 0 and metrics["optim/grad_norm"] > 0
    assert not is_unchanged(trainer, before) and all(w.isfinite().all() for w in weights_of(trainer))


def test_only_a_limited_number_of_consecutive_updates_is_skipped(accelerator: Accelerator) -> None:
    run = make_run(optimizer={"learning_rate": 0.1, "max_skipped_updates": 3}, updates_per_batch=2)
    trainer = make_moved_trainer(run, accelerator)
    groups, before = make_groups(trainer.policy), weights_of(trainer)
    for _ in range(2):  # with a valid update in between
        poisoned = poison(trainer)
        assert train_on(trainer, groups, VERSION, StepTimer())["optim/skipped_updates"] == 2
        poisoned.remove()
        assert train_on(trainer, groups, VERSION, StepTimer())["optim/skipped_updates"] == 0
    before = weights_of(trainer)
    poison(trainer)
    train_on(trainer, groups, VERSION, StepTimer())
    with pytest.raises(
        NotFiniteError,
        match=r"step 6: .* nan.* 3 times in a row \(learner\.optimizer\.max_skipped_upd.*; or start a new run with",
    ):
        train_on(trainer, groups, VERSION, StepTimer())
    assert is_unchanged(trainer, before)


class Overflowing(torch.optim.SGD):
    """Take one step that is far too large."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(1e38).mul_(1e38)


def test_overflowing_weights_are_an_error_with_the_step(accelerator: Accelerator) -> None:
    trainer = make_moved_trainer(make_run(), accelerator)
    groups = make_groups(trainer.policy)
    trainer.optimizer = Overflowing(trainer.policy.parameters(), lr=0.1)
    said = r"step 6 was too large.*rate 0\.1.*neither sent to a server nor saved.*first in transformer\.wte"
    with pytest.raises(NotFiniteError, match=said):
        train_on(trainer, groups, VERSION, StepTimer())


def test_a_model_with_nan_weights_is_rejected(accelerator: Accelerator, tmp_path: Path) -> None:
    for file in resolve_model("tiny:digits").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["transformer.wpe.weight"][3, 3] = math.inf
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    run_inputs = RunInputs(make_run())
    run_inputs.model_path = tmp_path
    with pytest.raises(NotFiniteError, match=r"the weights of .* contain NaN or inf \(first in transformer\.wpe"):
        make_trainer(run_inputs, accelerator, is_new=True)
