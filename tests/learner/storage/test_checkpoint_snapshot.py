"""A checkpoint has the state at its start, although training continues while it is written in the background."""

import threading
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.utils import set_seed

from learner.config import LearnerRun
from learner.policy.shards import ShardWriter
from learner.prompts.curriculum import Curriculum
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import RunProgress
from learner.storage.writer import CheckpointWriter
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import make_trainer
from learner.training.step import train_on
from tests.learner.ranks import on_two_ranks
from tests.learner.training.fixed_groups import VERSION, make_groups, make_run

TIMEOUT_S = 60.0
EVERYTHING_CHANGES: dict[str, Any] = {
    "reference": {"kind": "ema", "every_steps": 1, "alpha": 0.3},
    "kl": {"coef": 0.1, "schedule": "target", "target": 1e-4, "horizon_steps": 3},
    "curriculum": {"kind": "pass_rate"},
    "updates_per_batch": 2,
    "max_staleness": 5,
}
STAYS = ("index.json", "adapter_config.json", "README.md")
"""Files that stay the same: the tensor index and the description of an adapter."""


class Training:
    """The training state of a rank and the pass rates, all of which change at every step."""

    def __init__(self, accelerator: Accelerator, run: LearnerRun) -> None:
        set_seed(0)
        run_inputs = RunInputs(run)
        self.trainer = make_trainer(run_inputs, accelerator, is_new=True)
        self.groups = make_groups(self.trainer.policy, num_groups=run.learner.groups_per_step)
        self.curriculum = Curriculum(run.learner.curriculum, "share_right", run_inputs.prompts, 0, 0)
        self.version = VERSION

    def step(self) -> None:
        """Change weights, moments and their counts, reference, KL coefficient and pass rates."""
        self.curriculum.record(self.version, self.version % 3, {"share_right": [self.version % 5 / 4]})
        metrics = train_on(self.trainer, self.groups, self.version, StepTimer())
        self.version += 1
        self.curriculum.count(self.version)
        self.trainer.after_step(self.version, metrics)

    def begin(self, directory: Path) -> CheckpointWriter:
        writer = CheckpointWriter(self.trainer, directory)
        writer.begin(1, RunProgress(pass_rates=self.curriculum.pass_rates(self.version)), None, lambda: None)
        return writer

    def saved(self, directory: Path) -> dict[str, bytes]:
        """Write a checkpoint while training waits."""
        with self.begin(directory) as writer:
            writer.wait()
        return contents(directory)


def contents(directory: Path) -> dict[str, bytes]:
    (checkpoint,) = directory.glob("step-*")
    return {str(file.relative_to(checkpoint)): file.read_bytes() for file in checkpoint.rglob("*") if file.is_file()}


def compare_held_with_unhurried(accelerator: Accelerator, directory: Path, learner: dict[str, Any]) -> None:
    training = Training(accelerator, make_run(**EVERYTHING_CHANGES | learner))
    for _ in range(2):
        training.step()
    expected = training.saved(directory / "expected")
    write, is_there, may_write = ShardWriter.write_data, threading.Event(), threading.Event()

    def wait_and_write(writer: ShardWriter, *args: Any) -> Any:
        is_there.set()
        assert may_write.wait(TIMEOUT_S)
        return write(writer, *args)

    ShardWriter.write_data = wait_and_write  # type: ignore
    with training.begin(directory / "held") as writer:
        assert is_there.wait(TIMEOUT_S)
        for _ in range(2):
            training.step()
        set_seed(7)
        may_write.set()
        writer.wait()
    ShardWriter.write_data = write  # type: ignore
    accelerator.wait_for_everyone()
    after = training.saved(directory / "after")
    if accelerator.is_main_process:
        held = contents(directory / "held")
        assert held.keys() == expected.keys() == after.keys()
        assert [name for name, content in held.items() if content != expected[name]] == []
        unchanged = {Path(name) for name, content in after.items() if content == expected[name]}
        text_of_model = {path for path in unchanged if path.parts[0] == "model" and path.suffix != ".safetensors"}
        assert {path for path in unchanged - text_of_model if path.name not in STAYS} == set()


@pytest.mark.parametrize(
    "learner",
    [{}, {"lora": {"rank": 4}, "reference": {"kind": "every", "every_steps": 1}}],
    ids=["whole model", "adapter"],
)
def test_a_checkpoint_excludes_later_changes_of_training(
    accelerator: Accelerator, tmp_path: Path, learner: dict[str, Any]
) -> None:
    compare_held_with_unhurried(accelerator, tmp_path, learner)


@pytest.mark.system
def test_a_checkpoint_of_sharded_ranks_excludes_later_changes(tmp_path: Path) -> None:
    on_two_ranks(compare_held_with_unhurried, tmp_path, {"sharding": "full"})
