"""After a pytest worker is killed, its running test is reported, and every other test of its files runs once."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 120.0
FILES = {
    "conftest.py": "from tests.scheduling import make_scheduler as pytest_xdist_make_scheduler\n",
    "test_kills.py": """
import os, signal
import pytest

@pytest.mark.parametrize("number", range(6))
def test_one(number):
    with open(os.environ["STARTED"], "a") as file:
        file.write(f"kills {number}\\n")
    if number in (2, 5):
        os.kill(os.getpid(), signal.SIGKILL)
""",
    "test_other.py": """
import os, time
import pytest

@pytest.mark.parametrize("number", range(6))
def test_one(number):
    with open(os.environ["STARTED"], "a") as file:
        file.write(f"other {number}\\n")
    time.sleep(0.05)
""",
}


def test_a_test_that_kills_its_worker_fails_and_the_others_still_run(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    started = tmp_path / "started"
    command = [
        sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder",
        "-p", "no:cacheprovider", "-rA", "--rootdir", ".", ".",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT), "STARTED": str(started)}, timeout=TIMEOUT_S,
        capture_output=True, text=True,
    )  # fmt: skip
    failed = [f"test_kills.py::test_one[{number}]" for number in (2, 5)]
    assert sorted(re.findall(r"^FAILED (\S+) - worker '\w+' crashed", run.stdout, re.MULTILINE)) == failed, run.stdout
    assert "2 failed, 10 passed" in run.stdout
    assert sorted(started.read_text().split("\n")[:-1]) == sorted(
        f"{file} {n}" for file in ("kills", "other") for n in range(6)
    )
    assert run.returncode == 1
