"""A checkpoint is written while training continues. Only the next checkpoint and the end of the run wait for it."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from learner.policy.shards import ShardWriter
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import (
    RunProgress,
    checkpoint_of,
    complete_checkpoints,
    load_checkpoint,
    remove_checkpoint,
)
from learner.storage.files import DiskError, replace_file
from learner.storage.writer import CheckpointWriter
from learner.train import train
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from protocol.errors import ConfigError, DeadlineExceeded, ParityError, RankFailed
from protocol.model_files import resolve_model
from tests.learner import checkpoints
from tests.learner.ledgers import steps_kept
from tests.learner.model_engine import tiny_server
from tests.learner.ranks import on_two_ranks
from tests.learner.runs import make_run, metrics_of, seeded
from tests.learner.training.fixed_groups import make_run as make_plain_run
from tests.waiting import until


def before_writing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call `act` in the background before the shards of each checkpoint are written."""
    write = ShardWriter.write_data

    def act_and_write(writer: ShardWriter, *args: Any) -> Any:
        act()
        return write(writer, *args)

    monkeypatch.setattr(ShardWriter, "write_data", act_and_write)


def test_training_continues_during_a_slow_write_and_old_checkpoints_stay_until_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 3 is delayed until step 5 is done; that of step 6 must wait for it."""
    written_at: list[int] = []
    found: list[tuple[list[str], set[int]]] = []
    with tiny_server() as server:
        checkpoint = {"every_steps": 3, "keep_last": 1, "keep_best": 0}
        run = make_run(tmp_path, server.endpoint, **seeded(), steps=7, checkpoint=checkpoint)
        directory = Path(run.run_dir) / "checkpoints"

        def hold_the_first() -> None:
            written_at.append(len(metrics_of(run)))
            if len(written_at) == 1:
                until(lambda: len(metrics_of(run)) == 5)
            found.append(([path.name for path in complete_checkpoints(directory)], steps_kept(run)))

        before_writing(monkeypatch, hold_the_first)
        train(run, resume=False)
    assert written_at == [3, 6, 7]
    assert [names for names, _ in found] == [[], ["step-000003"], ["step-000006"]]
    for needed, (_, kept) in zip([{1, 2, 3, 4, 5}, {4, 5, 6}, {7}], found, strict=True):
        assert needed <= kept
    assert {path.name for path in directory.iterdir()} == {"step-000007", "run_id"} and steps_kept(run) == set()
    cost, *_ = (line for line in metrics_of(run) if "checkpoint/seconds" in line)
    assert cost["step"] > 5 and 0 < cost["checkpoint/stall_seconds"] < cost["checkpoint/seconds"]


def a_trainer(accelerator: Accelerator, **learner: Any) -> PolicyTrainer:
    return make_trainer(RunInputs(make_plain_run(**learner)), accelerator, is_new=True)


def test_a_single_rank_saves_beside_a_process_group_of_gpus(accelerator: Accelerator, tmp_path: Path) -> None:
    """`torchrun --nproc-per-node 1` initializes NCCL, for which gloo stands here as a backend of GPUs only."""
    torch.distributed.init_process_group("cuda:gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        checkpoints.save(a_trainer(accelerator), tmp_path, 3)
    finally:
        torch.distributed.destroy_process_group()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000003"]


def test_a_write_that_takes_too_long_ends_the_run_with_the_key_to_raise(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, notices = threading.Event(), list[None]()
    before_writing(monkeypatch, lambda: until(may_write.is_set))
    trainer = a_trainer(accelerator, checkpoint={"timeout_s": 0.1})
    monkeypatch.setattr(type(trainer.published), "still_waiting", lambda _: notices.append(None))
    with CheckpointWriter(trainer, tmp_path) as writer:
        writer.begin(1, RunProgress(), None, lambda: None)
        assert writer.pop_metrics() == {}
        with pytest.raises(
            DeadlineExceeded, match=r"step-000001 was not written within 0\.1 s.*learner\.checkpoint\.timeout_s"
        ):
            writer.begin(2, RunProgress(), 1, lambda: None)
        assert notices, "the other ranks must be notified of the wait"
        may_write.set()
        writer.wait()
        num_bytes = writer.pop_metrics()["checkpoint/bytes"]
    (checkpoint,) = complete_checkpoints(tmp_path)
    assert checkpoint.name == "step-000001"
    assert num_bytes == sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())


def test_files_are_durable_before_the_rename_and_the_rename_is_durable(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, named, sync = a_trainer(accelerator), tmp_path / "step-000001", os.fsync
    has_name_at: dict[str, bool] = {}

    def recorded(descriptor: int) -> None:
        has_name_at[os.readlink(f"/proc/self/fd/{descriptor}")] = named.exists()
        sync(descriptor)

    monkeypatch.setattr("os.fsync", recorded)
    checkpoint = checkpoints.save(trainer, tmp_path, 1)
    written = [str(path).replace(named.name, f"{named.name}.tmp") for path in (checkpoint, *checkpoint.rglob("*"))]
    assert has_name_at[str(tmp_path)] and [has_name_at[path] for path in written] == [False] * len(written)
    named = tmp_path / "run_id"
    has_name_at.clear()
    replace_file(named, b"run-1")
    assert has_name_at == {f"{named}.tmp": False, str(tmp_path): True}


def test_a_write_in_progress_survives_the_error_that_ends_the_run(accelerator: Accelerator, tmp_path: Path) -> None:
    with pytest.raises(ParityError), CheckpointWriter(a_trainer(accelerator), tmp_path) as writer:
        writer.begin(1, RunProgress(), None, lambda: None)
        raise ParityError("apart")
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000001"]


def test_an_immediate_stop_waits_for_no_write(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    before_writing(monkeypatch, lambda: until(may_write.is_set))
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(a_trainer(accelerator), tmp_path) as writer:
        writer.begin(1, RunProgress(), None, lambda: None)
        raise KeyboardInterrupt
    assert complete_checkpoints(tmp_path) == []
    may_write.set()


def test_a_disk_error_in_the_background_is_reported_at_the_next_step_and_leaves_no_files(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before_writing(monkeypatch, no_space)
    completed: list[int] = []
    with CheckpointWriter(a_trainer(accelerator), tmp_path) as writer:
        writer.begin(1, RunProgress(), None, lambda: completed.append(1))
        with pytest.raises(DiskError, match=r"step-000001\S* could not be written \(.*No space left.*--resume"):
            until(lambda: bool(writer.pop_metrics()))
        assert list(tmp_path.iterdir()) == completed == []
        writer.begin(2, RunProgress(), None, lambda: None)
        with caplog.at_level(logging.WARNING):
            pass
    assert "step-000002 was not completed" in caplog.text


def no_space() -> None:
    raise OSError(28, "No space left on device")


def save_a_part_each_until_one_fails(accelerator: Accelerator, directory: Path) -> None:
    trainer = a_trainer(accelerator, checkpoint={"export_model": False}, sharding="full")
    checkpoint = checkpoints.save(trainer, directory, 1)
    sizes = [(checkpoint / "trained" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(sizes) < 0.6 * sum(sizes), "a rank has written more than its part"
    if not accelerator.is_main_process:
        ShardWriter.write_data = lambda *_: no_space()  # type: ignore[method-assign]
    kind = DiskError if accelerator.is_main_process else RankFailed
    with CheckpointWriter(trainer, directory) as writer:
        writer.begin(2, RunProgress(), None, lambda: None)
        with pytest.raises(kind):
            writer.wait()
    accelerator.wait_for_everyone()
    assert list(directory.iterdir()) == [checkpoint]


@pytest.mark.system
def test_each_of_two_ranks_writes_its_part_and_a_disk_error_of_one_stops_both(tmp_path: Path) -> None:
    on_two_ranks(save_a_part_each_until_one_fails, tmp_path)


def start_a_writer_late(accelerator: Accelerator, directory: Path) -> None:
    trainer = a_trainer(accelerator, checkpoint={"timeout_s": 1.0})
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        time.sleep(2.5)
    with CheckpointWriter(trainer, directory):
        pass


@pytest.mark.system
def test_ranks_wait_longer_for_the_start_of_rank_0_than_for_a_checkpoint(tmp_path: Path) -> None:
    on_two_ranks(start_a_writer_late, tmp_path)


def test_a_fixed_reference_is_one_shared_file_that_outlives_the_first_checkpoint(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = a_trainer(accelerator, reference={"kind": "fixed"}, kl={"coef": 0.1})
    began_with = load_file(resolve_model("tiny:digits") / "model.safetensors")
    kept = {step: checkpoint_of(tmp_path, step) / "reference/__0_0.distcp" for step in (1, 2, 3)}
    with CheckpointWriter(trainer, tmp_path) as writer:
        writer.begin(1, RunProgress(), None, lambda: None)
        writer.begin(2, RunProgress(), 1, lambda: None)
        writer.wait()
        assert kept[1].stat().st_ino == kept[2].stat().st_ino and kept[2].stat().st_nlink == 2
        remove_checkpoint(checkpoint_of(tmp_path, 1))
        assert kept[2].stat().st_nlink == 1
        tensors = checkpoints.whole_tensors(kept[2].parent)
        assert tensors.keys() == {f"0/{name}" for name in began_with}
        assert all(torch.equal(tensors[f"0/{name}"], tensor) for name, tensor in began_with.items())

        def refuse(*_: object) -> None:
            raise PermissionError("links are not supported")

        monkeypatch.setattr("os.link", refuse)
        writer.begin(3, RunProgress(), 2, lambda: None)
        writer.wait()
    assert kept[2].stat().st_ino != kept[3].stat().st_ino and kept[2].read_bytes() == kept[3].read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "trained/index.json",
            r"step-000001 cannot be read \(.*\) and is the oldest .* new run from its model: --model \S*/step-000001",
        ),
        ("trained/__0_0.distcp", r"step-000001 cannot be read"),
        ("reference/__0_0.distcp", r"step-000001 cannot be read"),
        ("trained", r"earlier version of Slipstream.*--model \S*/step-000001/model"),
    ],
)
def test_a_damaged_or_outdated_checkpoint_is_rejected_with_a_remedy(
    accelerator: Accelerator, tmp_path: Path, name: str, message: str
) -> None:
    trainer = a_trainer(accelerator, reference={"kind": "fixed"}, kl={"coef": 0.1})
    path = checkpoints.save(trainer, tmp_path, 1) / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(trainer, tmp_path / "step-000001")


def test_a_damaged_checkpoint_is_moved_away_if_the_run_has_an_earlier_one(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    trainer = a_trainer(accelerator)
    for step in (1, 2):
        checkpoint = checkpoints.save(trainer, tmp_path, step)
    (checkpoint / "trained" / "index.json").write_text("{")
    with pytest.raises(ConfigError, match=r"Move it out of \S+, then --resume continues from step-000001"):
        load_checkpoint(trainer, checkpoint)


def test_another_policy_is_rejected_with_the_name_of_a_parameter(accelerator: Accelerator, tmp_path: Path) -> None:
    checkpoint = checkpoints.save(a_trainer(accelerator), tmp_path, 1)
    accelerator.free_memory()
    adapted = a_trainer(accelerator, lora={"rank": 4})
    with pytest.raises(
        ConfigError, match=r"contains another policy: it differs in transformer\.\S+ and \d+ more; resume with"
    ):
        load_checkpoint(adapted, checkpoint)
