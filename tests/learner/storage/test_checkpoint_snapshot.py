"""A checkpoint holds what there was when it began, whatever training changes before the background has written it."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from accelerate import Accelerator
from accelerate.utils import set_seed

from learner.config import LearnerRun
from learner.policy.shards import ShardWriter
from learner.rewards.workers import FunctionRewards, GroupRewards
from learner.rollouts.ledger import Ledger
from learner.rollouts.ledger_storage import group_id_of
from learner.rollouts.rollout_buffer import RolloutBuffer, ScoredGroup
from learner.run_inputs import RunInputs
from learner.storage.retention import Checkpoints, LearnerRecords
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import make_trainer
from learner.training.step import train_on
from tests.learner.ledgers import receive
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
"""Names and places of tensors, and what describes an adapter."""


class RunWithoutServer:
    """What a rank trains, and on rank 0 the books: groups are scored and taken without a server."""

    def __init__(self, accelerator: Accelerator, run: LearnerRun, directory: Path) -> None:
        set_seed(0)
        run_inputs = RunInputs(run)
        self.trainer = make_trainer(run_inputs, accelerator, is_new=True)
        self.groups = make_groups(self.trainer.policy, num_groups=run.learner.groups_per_step)
        self.version, self.books = VERSION, None
        if accelerator.is_main_process:
            self._ledger = Ledger(directory / "ledger.db")
            self._buffer = RolloutBuffer(run, run_inputs.prompts, self._ledger)
            self.books = LearnerRecords(self._ledger, self._buffer, dict)

    def train(self) -> None:
        """Take one step: weights, moments and their counts, reference, KL coefficient, pass rates."""
        if self.books is not None:
            self._take_groups()
        metrics = train_on(self.trainer, self.groups, self.version, StepTimer())
        self.version += 1
        self.trainer.after_step(self.version, metrics)

    def _take_groups(self) -> None:
        first = self._buffer._order.next_to_take
        self._buffer.admit(self.version)
        for slot in range(first, first + len(self.groups)):
            group = self.groups[slot - first]
            group_id = group_id_of(slot, attempt=0)
            assert self._buffer.receive(group_id) is not None
            assert receive(self._ledger, group_id, b"payload", 0, 10)
            functions = [FunctionRewards(name="share_right", rewards=[slot % 5 / 4])]
            rewards = GroupRewards(rewards=[0.0], functions=functions)
            ready = msgspec.structs.replace(group, slot=slot, group_id=group_id)
            self._buffer.score([ScoredGroup(ready, slot % 3, rewards)])
        assert self._buffer.pop_batch(VERSION, 0.0, is_connected=True, published=0, on_stale=print) is not None


def contents(directory: Path) -> dict[str, bytes]:
    (checkpoint,) = directory.glob("step-*")
    return {str(file.relative_to(checkpoint)): file.read_bytes() for file in checkpoint.rglob("*") if file.is_file()}


def begin(run: RunWithoutServer, directory: Path) -> Checkpoints:
    checkpoints = Checkpoints(run.trainer, directory, run.books, None)
    checkpoints.save(1)
    return checkpoints


def saved(run: RunWithoutServer, directory: Path) -> dict[str, bytes]:
    """Write a checkpoint that nothing happens beside."""
    with begin(run, directory) as checkpoints:
        checkpoints.wait()
    return contents(directory)


def hold_writer() -> tuple[threading.Event, threading.Event]:
    """Let the writer wait before the first byte of a tensor. Events: it has got there, it may go on."""
    write, is_there, may_write = ShardWriter.write_data, threading.Event(), threading.Event()

    def wait_and_write(writer: ShardWriter, *args: Any) -> Any:
        is_there.set()
        assert may_write.wait(TIMEOUT_S)
        return write(writer, *args)

    ShardWriter.write_data = wait_and_write  # type: ignore[method-assign]
    return is_there, may_write


def compare_held_with_unhurried(accelerator: Accelerator, directory: Path, learner: dict[str, Any]) -> None:
    run = RunWithoutServer(accelerator, make_run(**EVERYTHING_CHANGES | learner), directory)
    for _ in range(2):
        run.train()
    expected = saved(run, directory / "expected")
    write = ShardWriter.write_data
    is_there, may_write = hold_writer()
    with begin(run, directory / "held") as checkpoints:
        assert is_there.wait(TIMEOUT_S)
        for _ in range(2):
            run.train()
        set_seed(7)
        may_write.set()
        checkpoints.wait()
    ShardWriter.write_data = write  # type: ignore[method-assign]
    accelerator.wait_for_everyone()
    after = saved(run, directory / "after")
    if accelerator.is_main_process:
        held = contents(directory / "held")
        assert held.keys() == expected.keys() == after.keys()
        assert [name for name, content in held.items() if content != expected[name]] == []
        unchanged = {name for name, content in after.items() if content == expected[name]}
        assert {name for name in unchanged if Path(name).name not in STAYS and not is_text_of_model(name)} == set()


def is_text_of_model(name: str) -> bool:
    return name.startswith("model/") and not name.endswith(".safetensors")


@pytest.mark.parametrize(
    "learner",
    [{}, {"lora": {"rank": 4}, "reference": {"kind": "every", "every_steps": 1}}],
    ids=["whole model", "adapter"],
)
def test_a_checkpoint_holds_nothing_that_training_changed_after_it_began(
    accelerator: Accelerator, tmp_path: Path, learner: dict[str, Any]
) -> None:
    compare_held_with_unhurried(accelerator, tmp_path, learner)


@pytest.mark.system
def test_nor_does_one_of_ranks_that_share_the_policy(tmp_path: Path) -> None:
    on_two_ranks(compare_held_with_unhurried, tmp_path, {}, is_sharded=True)
