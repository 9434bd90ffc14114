"""Where checkpoints go: into a directory of one run, which all ranks see, apart from the run's own or not."""

import shutil
import threading
from pathlib import Path

import pytest
from accelerate import Accelerator

from learner.storage.checkpoint import best_models, complete_checkpoints
from learner.storage.checkpoint_dir import OWNER_FILE, claim, require_shared
from learner.storage.run_dir import open_run_dir
from learner.train import train
from protocol.errors import ConfigError
from tests.learner.model_engine import tiny_server
from tests.learner.ranks import on_two_ranks
from tests.learner.runs import make_run, metrics_of

LATE_S = 0.5


def see(accelerator: Accelerator, tmp_path: Path) -> None:
    """Each rank calls the same directory by a path of its own, as on two nodes."""
    rank, shared, timeout_s = accelerator.process_index, tmp_path / "shared", 4 * LATE_S
    shared.mkdir(exist_ok=True)
    mine = tmp_path / f"node-{rank}"
    mine.symlink_to(shared)
    require_shared(accelerator, mine, timeout_s)
    assert rank != 0 or not any(shared.iterdir()), "the probe is removed"

    late = tmp_path / f"late-{rank}"
    if rank == 0:
        late.symlink_to(shared)
    else:
        threading.Timer(LATE_S, late.symlink_to, [shared]).start()
    require_shared(accelerator, late, 20 * timeout_s)

    for case, problem in {
        "local": r"on rank 1: what rank 0 wrote there did not appear on \S+ within 1 s",
        "file": r"on rank 1: \S+ cannot write there \(\[Errno 20\]",
    }.items():
        path = tmp_path / f"{case}-{rank}"
        if case == "local" or rank == 0:
            path.mkdir()
        else:
            path.write_text("")
        # On both: a rank that went on alone would wait for the other.
        with pytest.raises(ConfigError, match=rf"learner.checkpoint.dir: the ranks do not share .*: {problem}"):
            require_shared(accelerator, path, timeout_s)


def test_ranks_that_do_not_share_the_directory_say_so_before_they_train(tmp_path: Path) -> None:
    on_two_ranks(see, tmp_path)


def test_a_directory_belongs_to_one_run(tmp_path: Path) -> None:
    directory = tmp_path / "shared/a"
    claim(directory, "a-1", may_have_checkpoints=False)
    claim(directory, "a-1", may_have_checkpoints=True)
    with pytest.raises(ConfigError, match=r"shared/a has checkpoints of the run a-1; choose another directory"):
        claim(directory, "b-2", may_have_checkpoints=True)
    (directory / "step-000001").mkdir()
    (directory / "step-000001/state.json").touch()
    (directory / OWNER_FILE).unlink()
    with pytest.raises(ConfigError, match="has checkpoints of another run"):
        claim(directory, "b-2", may_have_checkpoints=False)
    claim(directory, "a-1", may_have_checkpoints=True)  # one of an earlier version, or copied here
    with pytest.raises(ConfigError, match="of the run a-1"):
        claim(directory, "b-2", may_have_checkpoints=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"learner.checkpoint.dir: \S+/file/a cannot be written"):
        claim(tmp_path / "file/a", "a-1", may_have_checkpoints=False)


def test_checkpoints_go_to_a_directory_of_their_own_and_are_resumed_from_it_wherever_it_is_moved(
    tmp_path: Path,
) -> None:
    there, run_dir = tmp_path / "shared", tmp_path / "run"
    checkpoint = {"every_steps": 1, "keep_last": 1, "keep_best": 1}
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=3, checkpoint=checkpoint | {"dir": str(there)})
        train(run, resume=False)
        assert [path.name for path in complete_checkpoints(there)] == ["step-000003"] and not best_models(run_dir)
        assert (there / "step-000003/model/model.safetensors").is_file() and not (run_dir / "checkpoints").exists()

        elsewhere = make_run(
            tmp_path, server.endpoint, steps=4, checkpoint=checkpoint | {"dir": str(tmp_path / "moved")}
        )
        with pytest.raises(ConfigError, match=r"moved has no checkpoint of this run, and .*shared, where .* move"):
            open_run_dir(elsewhere, resume=True)
        there.rename(tmp_path / "moved")
        train(elsewhere, resume=True)
        assert [line["step"] for line in metrics_of(elsewhere)] == [1, 2, 3, 4]

        # Back to the default.
        back = make_run(tmp_path, server.endpoint, steps=5, checkpoint=checkpoint)
        with pytest.raises(ConfigError, match=r"run/checkpoints has no checkpoint of this run"):
            open_run_dir(back, resume=True)
        shutil.move(tmp_path / "moved", run_dir / "checkpoints")
        train(back, resume=True)
        assert [line["step"] for line in metrics_of(back)] == [1, 2, 3, 4, 5]


def test_a_resume_without_the_directory_of_its_checkpoints_is_rejected_and_changes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tcp://127.0.0.1:1", checkpoint={"dir": str(tmp_path / "mount/mine")})
    killed_early = open_run_dir(run, resume=False)
    killed_early.begin()
    killed_early.ledger.touch()
    killed_early.close()
    open_run_dir(run, resume=True).close()
    (tmp_path / "mount").rename(tmp_path / "unmounted")
    moved = make_run(tmp_path, "tcp://127.0.0.1:1", checkpoint={"dir": str(tmp_path / "empty")})
    for again in (run, run, moved):
        with pytest.raises(
            ConfigError, match=r"\S+/mount/mine, where this run wrote its checkpoints, is missing or em"
        ):
            open_run_dir(again, resume=True)
    assert not (tmp_path / "mount").exists() and not (tmp_path / "empty").exists()
    (tmp_path / "unmounted").rename(tmp_path / "mount")
    open_run_dir(moved, resume=True).close()
