"""The systemd units, checked by systemd, and their commands."""

import shlex
import subprocess
from configparser import RawConfigParser
from pathlib import Path

from inference_server.config import ServerConfig, ServerRun
from learner.config import LearnerRun
from protocol.errors import USER_ERROR
from tests.deploy.commands import DEPLOY, check, tool

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
INSTALLED = "/opt/slipstream"


def service(name: str) -> dict[str, str]:
    """Return the last value of each key of a section."""
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((DEPLOY / f"systemd/slipstream-{name}.service").read_text())
    return dict(parser["Service"])


def test_systemd_accepts_the_units_if_everything_is_installed(tmp_path: Path) -> None:
    for name in (".venv/bin/slipstream", "deploy/train_or_resume.sh"):
        path = tmp_path / "installed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    units = [tmp_path / unit.name for unit in UNITS]
    for unit, path in zip(UNITS, units, strict=True):
        path.write_text(unit.read_text().replace(INSTALLED, str(tmp_path / "installed")))
    command = [tool("systemd-analyze"), "verify", "--man=no", *map(str, units)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_unit_starts_a_valid_command_and_lets_it_shut_down() -> None:
    server, learner = service("server"), service("learner")
    for unit in (server, learner):
        run = check(shlex.split(unit["ExecStart"]))
        assert isinstance(run, (ServerRun, LearnerRun)) and run.keys == "/etc/slipstream/keys"
        # The signal is for the server, not for vLLM's processes; a second signal would end the learner immediately.
        assert unit["KillMode"] == "mixed"
        # Without access to /home, vLLM's cache is in the service's own directory.
        assert unit["ProtectHome"] == "yes" and f"HOME=/var/lib/{unit['StateDirectory']}" in unit["Environment"].split()
    assert float(server["TimeoutStopSec"].removesuffix("s")) > ServerConfig().drain_timeout_s
    assert learner["SuccessExitStatus"] == "75"  # a stopped learner has not failed
    # An error that a person has to solve is not met again and again.
    assert server["RestartPreventExitStatus"] == learner["RestartPreventExitStatus"] == str(USER_ERROR)
