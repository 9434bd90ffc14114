"""Full disks: a run ends with a clear error, keeps its committed state, and resumes when space is available."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from learner.storage.checkpoint import complete_checkpoints
from learner.storage.files import DiskError, JsonLinesFile, replace_file, writing
from learner.train import train
from tests.learner.model_engine import tiny_server
from tests.learner.mortal_learner import BALLAST, FullDisk, Life
from tests.learner.storage.same_end import assert_ends_alike, make_comparable_run

Disk = Callable[[Path, int], None]


@pytest.fixture
def mount() -> Iterator[Disk]:
    """Return a function that mounts a file system of some KiB at a path; a second call changes its size."""
    mounted: list[Path] = []

    def mount(path: Path, num_kib: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        options = f"size={num_kib}k" if path not in mounted else f"remount,size={num_kib}k"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True
        )
        if done.returncode and path not in mounted:
            pytest.skip(f"no file system may be mounted here: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        mounted.append(path)

    yield mount
    for path in dict.fromkeys(mounted):
        subprocess.run(["umount", "--lazy", str(path)], check=True)  # a failed test may keep a file open


def fill(directory: Path) -> None:
    FullDisk("logged").strike(directory)
    assert os.statvfs(directory).f_bfree == 0


def test_lines_on_a_full_disk_are_an_error_and_leave_only_complete_lines(tmp_path: Path, mount: Disk) -> None:
    disk = tmp_path / "disk"
    mount(disk, 64)
    lines = JsonLinesFile(disk / "metrics.jsonl")
    lines.append({"step": 1})
    fill(disk)
    with pytest.raises(DiskError, match=r"metrics\.jsonl could not be written \(.*0\.0 MiB are free.*--resume"):
        for step in range(2, 1000):
            lines.append({"step": step})
    lines.close()
    (disk / BALLAST).unlink()
    lines = JsonLinesFile(disk / "metrics.jsonl")
    lines.append({"step": step})
    lines.close()
    assert (disk / "metrics.jsonl").read_text().splitlines() == [f'{{"step": {i}}}' for i in range(1, step + 1)]


def test_every_writer_reports_the_path_and_the_free_space(tmp_path: Path, mount: Disk) -> None:
    disk = tmp_path / "disk"
    mount(disk, 64)
    for name, write in {
        "python": lambda path: path.write_bytes(bytes(1 << 20)),
        "safetensors": lambda path: save_file({"weight": torch.zeros(1 << 18)}, path),
        "torch": lambda path: torch.save({"weight": torch.zeros(1 << 18)}, path),
    }.items():
        with (
            pytest.raises(DiskError, match=rf"disk/{name} could not be written \(.*0\.\d MiB are free"),
            writing(disk / name),
        ):
            write(disk / name)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:51234"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=["a rank that has died", "a full GPU"],
)
def test_what_is_no_fault_of_the_disk_is_not_blamed_on_it(tmp_path: Path, error: RuntimeError) -> None:
    with pytest.raises(type(error), match=re.escape(str(error))), writing(tmp_path):
        raise error


def test_a_removed_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"gone/run/metrics\.jsonl could not be written \(.*No such file"):
        JsonLinesFile(tmp_path / "gone/run/metrics.jsonl")


def test_a_file_is_replaced_completely_or_unchanged(tmp_path: Path, mount: Disk) -> None:
    disk = tmp_path / "disk"
    mount(disk, 64)
    replace_file(disk / "config.toml", b"old")
    fill(disk)
    with pytest.raises(DiskError, match=r"config\.toml could not be written \(.*No space left"):
        replace_file(disk / "config.toml", bytes(100_000))
    (disk / BALLAST).unlink()
    assert {file.name: file.read_bytes() for file in disk.iterdir()} == {"config.toml": b"old"}


@pytest.mark.system
def test_a_run_ends_when_its_disk_fills_up_and_resumes_exactly(tmp_path: Path, mount: Disk) -> None:
    """A checkpoint takes 2.4 MiB. During its background write, the ledger or the log may fail first."""
    settings: dict[str, Any] = {
        "reference": {"kind": "every", "every_steps": 2}, "kl": {"coef": 0.1},
        "checkpoint": {"every_steps": 2, "keep_best": 0},
    }  # fmt: skip
    with tiny_server() as server:
        whole = make_comparable_run(tmp_path / "whole", server.endpoint, **settings)
        train(whole, resume=False)
    with tiny_server() as server:
        run = make_comparable_run(tmp_path / "full", server.endpoint, **settings)
        run_dir, checkpoints = Path(run.run_dir), Path(run.run_dir) / "checkpoints"
        mount(run_dir, 3 << 10)
        life = Life(run, resume=False)
        assert life.end() == 2, life.log
        assert [path.name for path in checkpoints.glob("step-*")] == ["step-000002"]
        assert len(complete_checkpoints(checkpoints)) == 1
        mount(run_dir, 16 << 10)
        for blow in (FullDisk("consumed"), FullDisk("logged", 2)):
            life = Life(run, blow, resume=True)
            assert life.end() == 2, life.log
            (run_dir / BALLAST).unlink()
        errors = re.findall(r"^error: .*", life.log, flags=re.MULTILINE)
        expected = re.compile(r"error: .*/run/.*(?:could not be (?:read or )?written|full).*free.*space.*--resume")
        assert len(errors) == 3 and all(map(expected.match, errors)), life.log
        assert Life(run, resume=True).end() == 0
    assert_ends_alike(run, whole)
