"""The reference in whole runs: what they log, how they resume, and what a refresh does to the optimizer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from learner.run_inputs import RunInputs
from learner.storage.checkpoint import find_checkpoint, load_checkpoint
from learner.train import train
from learner.training.policy_trainer import make_trainer
from protocol.errors import ConfigError
from tests.learner.checkpoints import save, steps_of_moments
from tests.learner.model_engine import tiny_server
from tests.learner.runs import make_run, metrics_of, seeded

ADAPTIVE = {"kind": "adaptive", "kl_threshold": 1e-9, "patience": 2, "reward_guard": False}
MIXTURE = {"kind": "mixture", "every_steps": 2, "num_snapshots": 2}
RESETTING = {"kind": "every", "every_steps": 5, "reset_optimizer": True}


def optimizer_steps_of(run: Any) -> set[int]:
    """How many steps the moments in the newest checkpoint have seen."""
    checkpoint = find_checkpoint(Path(run.run_dir) / "checkpoints")
    assert checkpoint is not None
    return steps_of_moments(checkpoint)


@pytest.mark.parametrize(
    ("reference", "versions", "moments_seen"),
    [
        # the KL is 0 at steps 1 and 4, the first under a new reference, and above the threshold at all others
        pytest.param(ADAPTIVE, [0, 0, 3, 3, 3, 6], 6, id="adaptive", marks=pytest.mark.slow),
        pytest.param(MIXTURE, [0, 2, 2, 4, 4, 6], 6, id="mixture"),
        pytest.param(RESETTING, [0, 0, 0, 0, 5, 5], 1, id="resetting", marks=pytest.mark.slow),
    ],
)
def test_a_run_stopped_after_step_five_goes_on_with_the_same_reference(
    tmp_path: Path, reference: dict, versions: list[int], moments_seen: int
) -> None:
    weights = []
    for name, parts in (("whole", [6]), ("parts", [5, 6])):
        with tiny_server() as server:
            for i, steps in enumerate(parts):
                settings = {"reference": reference, "kl": {"coef": 0.1}, "steps": steps}
                run = make_run(tmp_path / name, server.endpoint, **seeded(), **settings)
                train(run, resume=i > 0)
            weights.append(server.engine.weights)
        metrics = metrics_of(run)
        assert [line["reference/version"] for line in metrics] == versions
        assert [line["reference/refreshed"] for line in metrics] == [
            float(version == step) for step, version in enumerate(versions, 1)
        ]
        assert optimizer_steps_of(run) == {moments_seen}
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def run_with(tmp_path: Path, reference: dict | None):
    settings = {} if reference is None else {"reference": reference, "kl": {"coef": 0.1}}
    return make_run(tmp_path, "tcp://127.0.0.1:1", **settings)


def trainer_with(accelerator: Accelerator, tmp_path: Path, reference: dict | None):
    return make_trainer(RunInputs(run_with(tmp_path, reference)), accelerator, is_new=True)


@pytest.mark.parametrize(("before", "now"), [(MIXTURE, ADAPTIVE), (MIXTURE, None), (None, ADAPTIVE)])
def test_a_checkpoint_of_another_kind_of_reference_is_refused(
    accelerator: Accelerator, tmp_path: Path, before: dict | None, now: dict | None
) -> None:
    save(trainer_with(accelerator, tmp_path, before), tmp_path, 3)
    kinds = ["none" if settings is None else settings["kind"] for settings in (before, now)]
    with pytest.raises(ConfigError, match=f'learner.reference.kind = "{kinds[1]}" is not "{kinds[0]}", the kind in'):
        load_checkpoint(trainer_with(accelerator, tmp_path, now), tmp_path / "step-000003")


def test_with_a_coefficient_of_0_a_run_is_one_without_reference_and_says_so_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    swept = {"reference": ADAPTIVE, "kl": {"coef": 0.0, "estimator": "k1", "place": "reward"}}
    runs = []
    for name, settings in (("swept", swept), ("plain", {})):
        with tiny_server() as server:
            runs.append(make_run(tmp_path / name, server.endpoint, **seeded(), **settings, steps=2))
            train(runs[-1], resume=False)
    (line,) = (message for message in caplog.messages if "have no effect" in message)
    assert "learner.reference.kind = 'adaptive' (needs kl.coef above 0)" in line
    at_zero, plain = map(metrics_of, runs)
    assert [step["loss/policy"] for step in at_zero] == [step["loss/policy"] for step in plain]
    assert not any(name.startswith("reference/") for step in at_zero for name in step)
    assert 'kind = "adaptive"' in (tmp_path / "swept/run/config.toml").read_text()


def test_a_checkpoint_whose_state_cannot_be_read_is_named(accelerator: Accelerator, tmp_path: Path) -> None:
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / "state.json").write_text('{"step": 3, "version": 3}')
    with pytest.raises(ConfigError, match=r"step-000003/state\.json is damaged or from another version .*`reference`"):
        load_checkpoint(trainer_with(accelerator, tmp_path, None), tmp_path / "step-000003")


def test_a_reference_that_is_always_the_policy_itself_is_refused(tmp_path: Path) -> None:
    settings = {"reference": {"kind": "every", "every_steps": 1}, "kl": {"coef": 0.1}}
    with pytest.raises(ValueError, match=r"every_steps = 1: the KL is measured .* equals the policy"):
        make_run(tmp_path, "tcp://127.0.0.1:1", **settings)
    assert make_run(tmp_path, "tcp://127.0.0.1:1", **settings, updates_per_batch=2).learner.updates_per_batch == 2
