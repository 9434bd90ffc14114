import os
import re
from pathlib import Path

import pytest

import deploy.cpu_environment
from deploy.cpu_environment import LOCK, LOCK_HEADER, TORCH, install_packages, install_torch, uv_settings

PIP = """#!/bin/sh
case "$*" in
    *"config list") echo "global.index-url='https://mirror.example/simple'" ;;
    *) echo "$@" >> "$PIP_CALLS" ;;
esac
"""


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an environment whose Python records the calls of pip."""
    monkeypatch.setenv("PIP_CALLS", str(tmp_path / "pip_calls"))
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    write_program(tmp_path / "venv" / "bin" / "python", PIP)
    return tmp_path / "venv"


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def pip_calls(venv: Path) -> str:
    calls = venv.parent / "pip_calls"
    return calls.read_text() if calls.exists() else ""


def test_uv_uses_the_package_index_of_pip() -> None:
    config = (
        "global.cert='/etc/ssl/mirror.pem'\n"
        "global.extra-index-url='https://a.example/simple\\nfile:///b/simple'\n"
        "global.find-links='/wheels https://c.example/wheels'\n"
        "global.progress-bar='off'\n"
    )
    assert uv_settings(config) == {
        "SSL_CERT_FILE": "/etc/ssl/mirror.pem",
        "UV_EXTRA_INDEX_URL": "https://a.example/simple file:///b/simple",
        "UV_FIND_LINKS": "/wheels,https://c.example/wheels",
    }
    # Of two settings, the one that pip uses.
    lines = [":env:.timeout='3'", "global.timeout='1'", "install.timeout='2'", "list.timeout='4'"]
    assert uv_settings("\n".join(lines)) == {"UV_HTTP_TIMEOUT": "3"}
    assert uv_settings("\n".join(lines[1:])) == {"UV_HTTP_TIMEOUT": "2"}


def test_uv_installs_into_the_environment_even_if_another_is_active(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/another/venv")
    monkeypatch.setenv("UV_SYSTEM_PYTHON", "1")
    write_program(venv / "bin" / "uv", f"#!/bin/sh\nenv > {tmp_path}/uv_env\n")
    install_packages(venv, "toy", ["toy==1"])
    uv_env = dict(line.partition("=")[::2] for line in (tmp_path / "uv_env").read_text().splitlines())
    assert uv_env["VIRTUAL_ENV"] == str(venv)
    assert "UV_SYSTEM_PYTHON" not in uv_env
    assert uv_env["UV_INDEX_URL"] == "https://mirror.example/simple"
    assert Path(uv_env["TMPDIR"]).parent == venv
    assert pip_calls(venv) == ""
    assert os.listdir(venv) == ["bin"]


def test_pip_installs_without_uv_and_after_a_failure_of_uv(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install_packages(venv, "toy", ["toy==1"])
    assert pip_calls(venv).strip().endswith("install --no-deps --no-compile toy==1")
    write_program(venv / "bin" / "uv", "#!/bin/sh\necho error: first line\necho no such index >&2\nexit 2\n")
    install_packages(venv, "toy", ["toy==1"])
    assert "install --no-deps --no-compile toy==1 --force-reinstall" in pip_calls(venv)
    assert "uv could not install toy, using pip instead: no such index\n" in capsys.readouterr().out


def test_the_committed_lock_has_the_header_that_make_lock_writes() -> None:
    header = "".join(line for line in LOCK.read_text().splitlines(True) if line.startswith("#"))
    python = re.search(r"on Python (3\.\d+\.\d+),", header)
    assert python is not None and header == LOCK_HEADER.format(torch=TORCH, python=python[1])


HANGS = """#!/bin/sh
case "$*" in
    *"config list") ;;
    *) exec sleep 60 ;;
esac
"""


def test_a_hanging_installer_is_stopped_with_the_variable_to_raise(
    venv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deploy.cpu_environment, "TIMEOUT_S", 1.0)
    for name in ("python", "uv"):
        write_program(venv / "bin" / name, HANGS)
    with pytest.raises(SystemExit):
        install_packages(venv, "toy", ["toy==1"])
    output = capsys.readouterr()
    assert "uv could not install toy, using pip instead: stopped after 1 s" in output.out
    assert "stopped after 1 s. Set SLIPSTREAM_INSTALL_TIMEOUT_S" in output.err
    with pytest.raises(SystemExit):  # at its first call of pip
        install_torch(venv)
    assert "Set SLIPSTREAM_INSTALL_TIMEOUT_S" in capsys.readouterr().err
