"""Suggested install commands fit this installation, and started programs are of the same installation."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import installation
from protocol.installation import install_command, module_command
from protocol.messages import PROTOCOL_VERSION

ROOT = Path(__file__).parent.parent.parent
PIP = f"{sys.executable} -m pip install"


def test_a_checkout_installs_an_extra_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("learner,nccl") == f"{PIP} -e '{ROOT}[learner,nccl]'"
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    assert install_command("server-cpu") == f"make -C {ROOT} install"
    monkeypatch.setattr(sys, "prefix", "/an/environment/of/the/users")
    assert install_command("server-cpu") == f"make -C {ROOT} install, and start {ROOT}/.venv/bin/slipstream serve"


@pytest.mark.parametrize(
    ("direct_url", "expected"),
    [
        (None, "'slipstream-rl[nccl]'"),
        ({"url": "file:///src/slipstream", "dir_info": {}}, "'slipstream-rl[nccl] @ file:///src/slipstream'"),
        ({"url": "file:///w/slipstream_rl-0.1.0-py3-none-any.whl", "archive_info": {}},
         "'slipstream-rl[nccl] @ file:///w/slipstream_rl-0.1.0-py3-none-any.whl'"),
        ({"url": "https://git.example/s.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}},
         "'slipstream-rl[nccl] @ git+https://git.example/s.git@abc123'"),
    ],
)  # fmt: skip
def test_an_installed_package_is_reinstalled_from_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_url: dict[str, object] | None, expected: str
) -> None:
    about = tmp_path / "slipstream_rl-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slipstream-rl\nVersion: 0.1.0\n")
    if direct_url is not None:
        (about / "direct_url.json").write_text(json.dumps(direct_url))
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert install_command("nccl") == f"{PIP} {expected}"


def test_an_environment_without_pip_uses_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_has_pip", lambda: False)
    assert install_command("learner") == f"uv pip install --python {sys.executable} -e '{ROOT}[learner]'"


def test_no_message_names_a_package_missing_in_the_index() -> None:
    packages = ("protocol", "inference_server", "learner", "deploy")
    files = [
        path for package in packages for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".md", ".sh")
    ]
    files += [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert [str(path) for path in files if "slipstream-rl[" in path.read_text()] == []


@pytest.mark.parametrize(
    ("module", "program"),
    [("inference_server", "inference-server"), ("learner", "learner"), ("deploy.cli", "slipstream")],
)
@pytest.mark.usefixtures("shadowing_user_files")
def test_a_module_prints_its_version_in_any_working_directory(module: str, program: str) -> None:
    command = [*module_command(module), "--version"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    version = rf"{program} \d+\.\d+\.\d+ \(Slipstream, protocol {PROTOCOL_VERSION}, Python 3\.\d+\.\d+\)\n"
    assert re.fullmatch(version, told)


def test_inside_a_checkout_the_checkout_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert module_command("learner") == (sys.executable, "-m", "learner")
