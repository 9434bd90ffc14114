"""Fixtures of all tests, and how tests share a machine.

Every process of a test has one compute thread: the models are tiny, and spinning threads compete for the cores.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.inference_server.forked_server import fork_server
from tests.scheduling import make_scheduler

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
# Hides AMX and AVX-512 BF16, so that `dtype` defaults to float32 on every machine; tests in bfloat16 set it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")
# hypothesis would miss its own deadlines on a busy machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

pytest_plugins = ("tests.tiers", "tests.durations")
INSTALL_TIMEOUT_S = 1200
OPEN = pytest.StashKey[ExitStack]()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the workers share it
        config.stash[OPEN] = ExitStack()
        config.stash[OPEN].enter_context(fork_server())


def pytest_unconfigure(config: pytest.Config) -> None:
    if OPEN in config.stash:
        config.stash[OPEN].close()


@pytest.hookimpl(optionalhook=True)  # where xdist is off
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return make_scheduler(config, log)


@pytest.fixture(autouse=True, scope="session")
def cache_of_datasets(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use a temporary cache. `datasets` reads the variable on import, which no test does earlier."""
    os.environ["HF_DATASETS_CACHE"] = str(tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[..., str]:
    def make(*packages: str, inherit: bool = False) -> str:
        """Return the interpreter of a new environment with these packages, and with those of this one if `inherit`."""
        python = tmp_path / "env" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True, timeout=INSTALL_TIMEOUT_S)
        if inherit:
            (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
            (site / "inherited.pth").write_text(sysconfig.get_path("purelib") + "\n")
        install = [str(python), "-m", "pip", "install", "-q", *packages]
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        if done.returncode:
            pytest.skip(f"{' '.join(packages)} cannot be installed here: {done.stderr[-500:]}")
        return str(python)

    return make


@pytest.fixture
def shadowing_user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a directory with user modules that have the names of the product's packages."""
    for package in ("deploy", "learner", "inference_server"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('a user\\'s module')")
    (tmp_path / "protocol.py").write_text("raise SystemExit('a user\\'s module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(__file__).parent.parent)
    )  # the checkout of the tests is what is installed
    return tmp_path
