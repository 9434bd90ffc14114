"""What accelerate reads from the environment changes no number of a run, or is refused by name."""

import logging
from collections.abc import Iterator

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from learner.training.distributed import ranks_of
from protocol.errors import ConfigError
from tests.learner.training.fixed_groups import make_groups, make_moved_trainer, make_run
from tests.learner.training.gradients import gradient_of


@pytest.fixture(autouse=True)
def _fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    _reset()
    yield
    _reset()


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def gradient() -> torch.Tensor:
    run = make_run()
    with ranks_of(run) as accelerator:
        trainer = make_moved_trainer(run, accelerator)
        return gradient_of(trainer, make_groups(accelerator.unwrap_model(trainer.policy)))


def test_the_gradient_is_the_same_whatever_accelerate_finds_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "false",
    }.items():  # the defaults of `accelerate launch`
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        expected = gradient()
    assert caplog.messages == []
    _reset()
    ignored = {
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS = 4": "learner.groups_per_step",
        "ACCELERATE_MIXED_PRECISION = bf16": "dtype",
        "ACCELERATE_DYNAMO_BACKEND = EAGER": "learner.compile",
    }
    for setting in ignored:
        monkeypatch.setenv(*setting.split(" = "))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(gradient(), expected)
    for line, (setting, instead) in zip(caplog.messages, ignored.items(), strict=True):
        assert f"ignoring {setting}" in line and instead in line


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("ACCELERATE_USE_FSDP", "true", 'learner.sharding = "full"'),
        ("ACCELERATE_USE_DEEPSPEED", "true", 'learner.sharding = "full"'),
        ("ACCELERATE_USE_MEGATRON_LM", "true", 'learner.sharding = "full"'),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "tensor, context and sequence parallel"),
    ],
)
def test_what_would_train_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(name, value)
    with (
        pytest.raises(ConfigError, match=rf"{name} = .* in the environment is not supported.*{reason}.*Unset it"),
        ranks_of(make_run()),
    ):
        raise AssertionError("it was accepted")


def test_a_rank_that_would_train_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate ignores the others without LOCAL_RANK, and where torch finds no GPU."""
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ConfigError, match=r"WORLD_SIZE = 2 .*train alone.*ACCELERATE_USE_CPU=true"),
        ranks_of(make_run()),
    ):
        raise AssertionError("it was accepted")
