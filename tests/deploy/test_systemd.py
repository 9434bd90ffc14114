"""The units, by systemd's own checker, and their commands by ours."""

import shlex
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from inference_server.config import ServerConfig, ServerRun
from learner.config import LearnerRun
from tests.deploy.commands import DEPLOY, check, tool

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
INSTALLED = "/opt/slipstream"


def section(unit: Path, name: str) -> dict[str, str]:
    """The last value of each key."""
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(unit.read_text())
    return dict(parser[name])


def complaints(units: dict[str, str], tmp_path: Path) -> str:
    """What systemd says of these units where everything is installed."""
    for command in (".venv/bin/slipstream", "deploy/train_or_resume.sh"):
        path = tmp_path / "installed" / command
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    paths = [tmp_path / name for name in units]
    for path, text in zip(paths, units.values(), strict=True):
        path.write_text(text.replace(INSTALLED, str(tmp_path / "installed")))
    command = [tool("systemd-analyze"), "verify", "--man=no", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr + (f"exit status {done.returncode}" if done.returncode else "")


def test_systemd_has_no_complaint(tmp_path: Path) -> None:
    units = {unit.name: unit.read_text() for unit in UNITS}
    assert complaints(units, tmp_path) == ""


def test_systemd_would_complain_of_a_key_that_it_does_not_know(tmp_path: Path) -> None:
    unit = DEPLOY / "systemd/slipstream-learner.service"
    wrong = unit.read_text().replace("KillMode=mixed", "KilMode=mixed")
    assert "Unknown key" in complaints({unit.name: wrong}, tmp_path)


@pytest.mark.parametrize("unit", UNITS, ids=[unit.name for unit in UNITS])
def test_a_unit_starts_a_command_of_ours(unit: Path) -> None:
    run = check(shlex.split(section(unit, "Service")["ExecStart"]))
    assert isinstance(run, (ServerRun, LearnerRun)) and run.keys == "/etc/slipstream/keys"


def test_a_server_is_killed_only_after_it_could_drain() -> None:
    service = section(DEPLOY / "systemd/slipstream-server.service", "Service")
    assert float(service["TimeoutStopSec"].removesuffix("s")) > ServerConfig().drain_timeout_s
    assert service["KillMode"] == "mixed"  # the signal is for the server, not for vLLM's processes


def test_a_learner_that_is_stopped_has_not_failed_and_one_in_error_is_not_started_again() -> None:
    service = section(DEPLOY / "systemd/slipstream-learner.service", "Service")
    assert service["SuccessExitStatus"] == "75" and service["RestartPreventExitStatus"] == "2"
    assert service["KillMode"] == "mixed"  # the learner gets one signal, by its script; a second would end it at once
