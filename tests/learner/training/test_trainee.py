"""What is trained: what it refuses, and how the weight of the KL moves."""

from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from learner.config import LearnerConfig
from learner.run_inputs import RunInputs
from learner.training.optimizer import next_coef
from learner.training.policy_trainer import make_trainer
from protocol.errors import ConfigError
from tests.learner.training.fixed_groups import make_run


@pytest.mark.parametrize(
    ("learner", "remedy"),
    [
        ({"optimizer": {"kind": "adamw_8bit"}}, 'learner.optimizer.kind to "adamw"'),
    ],
)
def test_what_does_not_go_with_sharding_is_refused(learner: dict, remedy: str) -> None:
    accelerator = SimpleNamespace(num_processes=2)
    with pytest.raises(ConfigError, match=remedy):
        make_trainer(RunInputs(make_run(sharding="full", **learner)), accelerator, is_new=True)


def coefs(config: LearnerConfig, measured: list[float | None]) -> list[float]:
    """The weight each step is trained with, of steps that measured these KLs."""
    used, coef = [], config.kl.coef
    for version, kl in enumerate(measured, start=1):
        used.append(coef)
        coef = next_coef(config.kl, coef, version=version, num_steps=config.steps, measured_kl=kl)
    return used


def test_a_linear_weight_starts_at_coef_and_ends_at_final_coef() -> None:
    kl = {"coef": 0.4, "schedule": "linear", "final_coef": 0.0}
    config = make_run(steps=5, kl=kl, reference={"kind": "fixed"}).learner
    assert coefs(config, [None] * 5) == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])


def test_a_controlled_weight_moves_by_a_bounded_share_towards_the_target() -> None:
    kl = {"coef": 1.0, "schedule": "target", "target": 0.1, "horizon_steps": 2}
    config = make_run(kl=kl, reference={"kind": "fixed"}).learner
    # errors: +0.2 (of +9), none measured, -0.1, -0.2 (of -1)
    assert coefs(config, [1.0, None, 0.09, 0.0, 0.1]) == pytest.approx([1.0, 1.1, 1.1, 1.045, 0.9405])


def test_a_resume_with_more_steps_goes_on_with_the_weight_of_the_longer_run(accelerator: Accelerator) -> None:
    kl = {"coef": 0.4, "schedule": "linear", "final_coef": 0.0}
    longer = make_run(steps=9, kl=kl, reference={"kind": "fixed"})
    trainer = make_trainer(RunInputs(longer), accelerator, is_new=False)
    trainer.kl_coef = 0.0  # as the checkpoint of a run of 5 steps has it
    trainer.set_kl_coef(4, None)
    assert trainer.kl_coef == pytest.approx(0.2)
