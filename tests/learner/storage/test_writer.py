"""A checkpoint is written while training goes on; the next, the end of the run and nothing else wait for it."""

import logging
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

from learner.config import LearnerRun
from learner.policy.shards import ShardWriter
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import RunProgress, complete_checkpoints, load_checkpoint
from learner.storage.files import DiskError
from learner.storage.writer import CheckpointWriter
from learner.train import train
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from protocol.errors import ConfigError, DeadlineExceeded, ParityError, RankFailed
from tests.learner import checkpoints
from tests.learner.ledgers import steps_kept
from tests.learner.model_engine import tiny_server
from tests.learner.ranks import on_two_ranks
from tests.learner.runs import make_run, metrics_of, seeded
from tests.learner.training.fixed_groups import make_run as make_plain_run

PATIENCE_S = 60.0


def checkpoints_of(run: LearnerRun) -> Path:
    return Path(run.run_dir) / "checkpoints"


def before_writing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call `act` in the background whenever the shards of a checkpoint are about to be written."""
    write = ShardWriter.write_data

    def act_and_write(writer: ShardWriter, *args: Any) -> Any:
        act()
        return write(writer, *args)

    monkeypatch.setattr(ShardWriter, "write_data", act_and_write)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_training_goes_on_beside_a_slow_write_and_the_checkpoint_holds_what_was_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of step 3 is held up until step 5 is done; that of step 6 has to wait for it."""
    with tiny_server() as server:
        short = make_run(tmp_path / "short", server.endpoint, **seeded(), steps=3)
        train(short, resume=False)
    with tiny_server() as server:
        run = make_run(
            tmp_path / "long", server.endpoint, **seeded(), steps=7, checkpoint={"every_steps": 3, "keep_last": 0}
        )
        begun: list[int] = []
        found: list[tuple[list[Path], set[int]]] = []

        def hold_the_first() -> None:
            begun.append(len(metrics_of(run)))
            if len(begun) == 1:
                until(lambda: len(metrics_of(run)) == 5)
            found.append((complete_checkpoints(checkpoints_of(run)), steps_kept(run)))

        before_writing(monkeypatch, hold_the_first)
        train(run, resume=False)
    assert begun == [3, 6, 7]
    assert [[path.name for path in paths] for paths, _ in found] == [
        [],
        ["step-000003"],
        ["step-000003", "step-000006"],
    ]
    assert found[0][1] == {1, 2, 3, 4, 5}, "there is no checkpoint yet"
    three, six, seven = complete_checkpoints(checkpoints_of(run))
    expected = checkpoints.tensors_of(checkpoints_of(short) / "step-000003")
    tensors = checkpoints.tensors_of(three)
    assert tensors.keys() == expected.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, expected[name])] == []
    exported, weights = load_file(three / "model" / "model.safetensors"), checkpoints.weights_of(three)
    assert exported.keys() == weights.keys() and all(torch.equal(exported[name], weights[name]) for name in weights)
    assert checkpoints.steps_of_moments(six) == {6} and checkpoints.steps_of_moments(seven) == {7}
    costs = [line for line in metrics_of(run) if "checkpoint/seconds" in line]
    assert costs and costs[0]["step"] > 5
    files = [file.stat().st_size for file in three.rglob("*") if file.is_file()]
    assert costs[0]["checkpoint/bytes"] == sum(files) > 3 * 4 * 100_000
    assert 0 < costs[0]["checkpoint/stall_seconds"] < costs[0]["checkpoint/seconds"]


def test_nothing_is_removed_or_forgotten_before_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    with tiny_server() as server:
        checkpoint = {"every_steps": 2, "keep_last": 1, "keep_best": 0}
        run = make_run(tmp_path, server.endpoint, **seeded(), steps=5, checkpoint=checkpoint)

        def look() -> None:
            names = [path.name for path in complete_checkpoints(checkpoints_of(run))]
            found.append((names, steps_kept(run)))

        before_writing(monkeypatch, look)
        train(run, resume=False)
    assert [names for names, _ in found] == [[], ["step-000002"], ["step-000004"]]
    for needed, (_, kept) in zip([{1, 2}, {3, 4}, {5}], found, strict=True):
        assert needed <= kept
    assert [path.name for path in checkpoints_of(run).iterdir()] == ["step-000005"]
    assert steps_kept(run) == set()


def a_trainer(accelerator: Accelerator, **checkpoint: Any) -> PolicyTrainer:
    return make_trainer(RunInputs(make_plain_run(checkpoint=checkpoint)), accelerator, is_new=True)


def test_one_that_takes_too_long_ends_the_run_with_the_key_to_raise(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    before_writing(monkeypatch, lambda: until(may_write.is_set))
    with CheckpointWriter(a_trainer(accelerator, timeout_s=0.1), tmp_path) as writer:
        writer.begin(1, RunProgress(), None, lambda: None)
        assert writer.pop_metrics() == {}
        with pytest.raises(
            DeadlineExceeded, match=r"step-000001 was not written within 0\.1 s.*learner\.checkpoint\.timeout_s"
        ):
            writer.begin(2, RunProgress(), 1, lambda: None)
        may_write.set()
        writer.wait()
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000001"]


def test_one_under_way_survives_the_error_that_ends_the_run(accelerator: Accelerator, tmp_path: Path) -> None:
    with pytest.raises(ParityError), CheckpointWriter(a_trainer(accelerator), tmp_path) as writer:
        writer.begin(1, RunProgress(), None, lambda: None)
        raise ParityError("apart")
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000001"]


def test_who_wants_to_stop_now_waits_for_none(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    before_writing(monkeypatch, lambda: until(may_write.is_set))
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(a_trainer(accelerator), tmp_path) as writer:
        writer.begin(1, RunProgress(), None, lambda: None)
        raise KeyboardInterrupt
    assert complete_checkpoints(tmp_path) == []
    may_write.set()


def test_a_disk_that_fails_in_the_background_is_reported_at_the_next_step_and_leaves_nothing(
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


def fail_on_the_second_rank(accelerator: Accelerator, directory: Path) -> None:
    if not accelerator.is_main_process:
        ShardWriter.write_data = lambda *_: no_space()  # type: ignore[method-assign]
    kind = DiskError if accelerator.is_main_process else RankFailed
    with CheckpointWriter(a_trainer(accelerator), directory) as writer:
        writer.begin(1, RunProgress(), None, lambda: None)
        with pytest.raises(kind):
            writer.wait()
    accelerator.wait_for_everyone()
    assert list(directory.iterdir()) == []


def test_the_disk_of_any_rank_stops_all_of_them(tmp_path: Path) -> None:
    on_two_ranks(fail_on_the_second_rank, tmp_path, is_sharded=True)


def save_and_count(accelerator: Accelerator, directory: Path) -> None:
    trainer = a_trainer(accelerator, export_model=False)
    checkpoint = checkpoints.save(trainer, directory, 1)
    sizes = [(checkpoint / "trained" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(sizes) < 0.6 * sum(sizes), "one of them has written more than its own"


def test_each_of_two_ranks_that_share_a_policy_writes_its_own_part(tmp_path: Path) -> None:
    on_two_ranks(save_and_count, tmp_path, is_sharded=True)


def test_a_checkpoint_of_whole_files_is_refused_with_what_to_do(accelerator: Accelerator, tmp_path: Path) -> None:
    trainer = a_trainer(accelerator)
    checkpoint = checkpoints.save(trainer, tmp_path, 1)
    shutil.rmtree(checkpoint / "trained")
    with pytest.raises(ConfigError, match=r"earlier version of Slipstream.*--model \S*/step-000001/model"):
        load_checkpoint(trainer, checkpoint)


def test_another_policy_is_refused_by_the_name_of_a_parameter(accelerator: Accelerator, tmp_path: Path) -> None:
    checkpoint = checkpoints.save(a_trainer(accelerator), tmp_path, 1)
    accelerator.free_memory()
    adapted = make_trainer(RunInputs(make_plain_run(lora={"rank": 4})), accelerator, is_new=True)
    with pytest.raises(
        ConfigError, match=r"contains another policy: it differs in transformer\.\S+ and \d+ more; resume with"
    ):
        load_checkpoint(adapted, checkpoint)
