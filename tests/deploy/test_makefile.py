"""Which files `make` deletes and which it keeps."""

import fcntl
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_clean_removes_generated_files_and_no_run(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in (".venv/bin", "runs/demo/checkpoints", ".pytest_cache", "learner/__pycache__", "build"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/demo/checkpoints/state").touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, timeout=60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Makefile", "learner", "runs"]
    assert (tmp_path / "runs/demo/checkpoints/state").exists() and not (tmp_path / "learner/__pycache__").exists()


def test_demo_sets_an_earlier_run_aside_unless_a_learner_writes_to_it_or_it_is_resumed(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    run_dir = tmp_path / "runs/demo"
    run_dir.mkdir(parents=True)
    make = ["make", "demo", "STAMP=", "SLIPSTREAM=true"]
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = subprocess.run(make, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert running.returncode == 2 and "a learner is writing to runs/demo" in running.stderr
    subprocess.run([*make, "ARGS=--resume"], cwd=tmp_path, check=True, timeout=60)
    assert run_dir.exists()
    subprocess.run(make, cwd=tmp_path, check=True, timeout=60)
    (aside,) = (tmp_path / "runs").iterdir()
    assert aside.name.startswith("demo-2")
