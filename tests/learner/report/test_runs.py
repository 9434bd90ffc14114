"""`learner runs`: its output for runs that are running, ended, stopped or unreadable."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from learner.config import LearnerRun
from learner.report.runs import as_table, list_runs
from learner.report.summary import RunDirectoryError
from learner.storage.run_dir import RunDir
from protocol.config import load_config
from tests.learner.in_process import run_here
from tests.learner.report.synthetic_run import write_lines

ROOT = Path(__file__).parents[3]


def begin(path: Path, steps: int, num_done: int = 0, ended_at: float = 0.0) -> RunDir:
    """Return a run directory that is open in a learner."""
    arguments = [str(ROOT / "deploy/recipes/reverse.toml"), "--run-dir", str(path), "--learner.steps", str(steps)]
    run_dir = RunDir(path, load_config(LearnerRun, arguments, "learner train"))
    run_dir.begin()
    lines = [
        {"step": step, "time": ended_at, "elapsed_s": 2.0 * step, "reward/mean": step / 10}
        for step in range(1, num_done + 1)
    ]
    write_lines(run_dir.metrics, lines)
    return run_dir


def test_running_ended_and_stopped_runs_are_distinguished(tmp_path: Path) -> None:
    now = time.time()
    going = begin(tmp_path / "going", steps=9, num_done=4, ended_at=now)
    with going.metrics.open("a") as metrics:
        metrics.write('{"step": 5, "ti')  # an incomplete line
    begin(tmp_path / "more" / "ended", steps=3, num_done=3, ended_at=now - 50).close()
    begin(tmp_path / "stopped", steps=9, num_done=2, ended_at=now - 100).close()
    begin(tmp_path / "new", steps=9).close()
    found = list_runs(tmp_path)
    assert [(Path(run.path).name, run.state, run.step, run.steps) for run in found] == [
        ("going", "running", 4, 9),
        ("ended", "finished", 3, 3),
        ("stopped", "stopped", 2, 9),
        ("new", "stopped", 0, 9),
    ]
    assert (found[0].reward, found[0].elapsed_s, found[0].newest_at, found[0].model) == (0.4, 8.0, now, "tiny:digits")
    assert found[3].reward is None and found[3].newest_at is None
    going.close()
    assert list_runs(tmp_path)[0].state == "stopped"


OTHER_DEVICE = """
mount -t tmpfs none "$0" && cd "$0" && mkdir lower upper work merged && mount -t tmpfs none lower &&
mount -t overlay none -o lowerdir=lower,upperdir=upper,workdir=work merged || exit 77
mkdir merged/run && cp "$1" merged/run/config.toml && exec flock merged/run/.lock "$2" -m learner runs merged --json
"""


@pytest.mark.system
def test_a_run_on_a_file_system_with_device_numbers_of_its_own_is_running(tmp_path: Path) -> None:
    begin(tmp_path / "run", steps=9).close()
    (tmp_path / "mount").mkdir()
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", OTHER_DEVICE, str(tmp_path / "mount")]
    listed = subprocess.run(
        [*command, str(tmp_path / "run" / "config.toml"), sys.executable],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if listed.returncode == 77 or listed.stderr.startswith("unshare: "):
        pytest.skip(f"this machine lets nobody mount an overlay: {listed.stderr}")
    assert [run["state"] for run in json.loads(listed.stdout)] == ["running"], listed.stderr


def test_listing_a_run_never_blocks_its_learner(tmp_path: Path) -> None:
    begin(tmp_path / "run", steps=9).close()
    num_looks, is_over = 0, threading.Event()

    def look() -> None:
        nonlocal num_looks
        while not is_over.is_set():
            num_looks += len(list_runs(tmp_path))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        while num_looks < 30 and looker.is_alive():
            begin(tmp_path / "run", steps=9).close()  # raises if the directory is taken
    finally:
        is_over.set()
        looker.join()
    assert num_looks >= 30


def test_a_run_whose_files_are_broken_is_reported_with_the_reason(tmp_path: Path) -> None:
    begin(tmp_path / "whole", steps=1, num_done=1, ended_at=5.0).close()
    begin(tmp_path / "config", steps=1).close()
    (tmp_path / "config" / "config.toml").write_text("steps = [")
    begin(tmp_path / "metrics", steps=1).close()
    (tmp_path / "metrics" / "metrics.jsonl").write_text("no JSON\n")
    begin(tmp_path / "no_object", steps=1).close()
    (tmp_path / "no_object" / "metrics.jsonl").write_text("[1]\n")
    table = as_table(list_runs(tmp_path)).splitlines()
    assert [line.split()[:2] for line in table[1:]] == [
        [str(tmp_path / "whole"), "finished"],
        [str(tmp_path / "config"), "unreadable"],
        [str(tmp_path / "metrics"), "unreadable"],
        [str(tmp_path / "no_object"), "unreadable"],
    ]
    assert "TOMLDecodeError" in table[2] and "JSONDecodeError" in table[3]


@pytest.mark.parametrize(("name", "expected"), [("empty", "no run in"), ("nowhere", "is not a directory")])
def test_a_directory_without_runs_is_an_error(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirectoryError, match=expected):
        list_runs(tmp_path / name)


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    begin(tmp_path / "run", steps=1200, num_done=600, ended_at=time.time() - 90).close()
    head, line = run_here("runs", str(tmp_path)).stdout.splitlines()
    assert head.split() == ["run", "state", "step", "reward", "trained", "for", "last", "step", "model"]
    assert line.split()[1:4] == ["stopped", "600/1,200", "60.00"] and "20 min 00 s" in line and "ago" in line
    (found,) = json.loads(run_here("runs", str(tmp_path), "--json").stdout)
    assert (found["state"], found["step"], found["reward"]) == ("stopped", 600, 60.0)
    refused = run_here("runs", str(tmp_path / "nowhere"))
    assert refused.returncode == 2 and refused.stderr.startswith("error: ") and refused.stdout == ""
    assert "unrecognized arguments: --all; see slipstream runs --help" in run_here("runs", "--all").stderr
