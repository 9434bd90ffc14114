"""The CPU budget of a test and the recorded durations, in a run of pytest with a budget of 0.1 s."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.durations import Phase

ROOT = Path(__file__).parent.parent
CONFTEST = """
pytest_plugins = ("tests.tiers", "tests.durations")
def pytest_configure(config):
    import tests.tiers
    tests.tiers.CPU_S = 0.1
    config.addinivalue_line("markers", "system: of the whole system")
"""
TESTS = """
import time
import pytest

def burn():
    started = time.process_time()
    while time.process_time() < started + 0.3:
        pass

@pytest.fixture(scope="module")
def expensive():
    time.sleep(0.3)

def test_waits(expensive): time.sleep(0.3)
def test_burns(): burn()
@pytest.mark.system
def test_burns_for_the_whole_system(): burn()
"""


def test_a_test_over_its_budget_fails_and_its_duration_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_burning.py").write_text(TESTS)
    record = tmp_path / "record.jsonl"
    options = ["-p", "no:cacheprovider", "-rf", "--rootdir", ".", "--record", str(record)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "pytest", *options, "."]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50)
    assert "1 failed, 2 passed" in run.stdout, run.stdout + run.stderr
    assert re.search(r"FAILED test_burning.py::test_burns - it took 0\.\d s of CPU; the limit of", run.stdout)
    phases = [msgspec.json.decode(line, type=Phase) for line in record.read_bytes().splitlines()]
    assert len(phases) == 9
    waits = [phase for phase in phases if phase.test == "test_burning.py::test_waits"]
    assert sum(phase.duration_s for phase in waits) > 0.5 > waits[-1].cpu_s
    assert [name for name, _ in waits[-1].fixtures] == ["test_burning.py::expensive"]
    assert {phase.test[22:]: phase.tier for phase in phases if phase.cpu_s > 0.2} == {
        "burns": "test",
        "burns_for_the_whole_system": "system",
    }
