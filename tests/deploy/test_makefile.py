"""Which files `make` deletes and which it keeps."""

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
