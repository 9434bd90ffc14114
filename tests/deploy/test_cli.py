"""`slipstream`: help, lazy imports, and start in any working directory."""

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from deploy.cli import COMMANDS, usage
from learner.__main__ import COMMANDS as OF_THE_LEARNER
from protocol.messages import PROTOCOL_VERSION

ROOT = Path(__file__).parent.parent.parent
RECIPE = str(ROOT / "deploy/recipes/reverse.toml")
SCRIPT = "import sys\nfrom deploy.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
"""What pip installs as the command."""
EACH = """
import contextlib, io, json, logging, sys
from deploy.cli import main
for words in json.loads(sys.argv[1]):
    code, out, err = 0, io.StringIO(), io.StringIO()
    logging.root.handlers.clear()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
"""Commands one after the other in one interpreter, which imports once."""
WARN_AND_FAIL = """
import logging
import protocol.config
from protocol.errors import ConfigError

def warn_and_fail(*_):
    logging.getLogger("protocol.config").warning("old key")
    raise ConfigError("new key")

protocol.config.load_config = warn_and_fail
"""
"""A config that has a key to warn about, and then an error."""
HEADS = ("\nflags:\n  --", "\ncommon keys:\n  --model ", "\nall keys, by section:\n", " options ", "--model STR")
WITH_KEYS = ("serve", "train", "colocate", "ray", "evaluate", "check", "doctor", "self-test")


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str


def slipstream(*commands: Sequence[str], first: str = "") -> list[Done]:
    command = [sys.executable, "-c", first + EACH, json.dumps(commands)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [Done(*json.loads(line)) for line in done.stdout.splitlines()]


def loaded_by(*arguments: str) -> set[str]:
    """Return the top-level modules that a command has imported at its end."""
    script = (
        "import sys\nfrom deploy.cli import main\n"
        f"try:\n    main({list(arguments)})\nexcept SystemExit:\n    pass\n"
        "print('\\nmodules:', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("modules:")[2].split())


def test_the_help_has_a_line_for_each_command_and_that_of_a_command_its_usage_flags_common_keys_and_all() -> None:
    whole, alone, *each = slipstream(["--help"], [], *([command, "--help"] for command in COMMANDS))
    assert whole.stdout == usage() + "\n" == alone.stdout
    assert re.findall(r"^  ([\w-]+) +\w", whole.stdout, re.MULTILINE) == COMMANDS
    assert set(COMMANDS) == {*OF_THE_LEARNER, "serve", "colocate", "ray", "plan", "keys"}
    for command, done in zip(COMMANDS, each, strict=True):
        assert done.code == 0 and done.stdout.startswith(f"usage: slipstream {command} "), done.stderr
        offsets = [done.stdout.find(head) for head in HEADS] if command in WITH_KEYS else [1]
        assert offsets == sorted(offsets) and offsets[0] > 0, done.stdout[:3000]
    assert all("--quiet" in done.stdout and "--json-logs" in done.stdout for done in (whole, *each))


def test_the_version_is_that_of_the_program() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for done in slipstream(["--version"], ["train", "--version"], ["serve", "--version"]):
        assert done.stdout.startswith(f"slipstream {version} (Slipstream, protocol {PROTOCOL_VERSION}, ")


def test_a_mistake_is_one_line_and_exit_code_2() -> None:
    mistakes = {
        ("trian", RECIPE): r"unknown command 'trian'; expected one of colocate, ray, serve, .*; did you mean train\?",
        ("xyz",): r"unknown command 'xyz'; expected one of .*; see `slipstream --help`",
        ("serve",): r"expected: slipstream serve run\.toml",
        ("doctor", "--server"): r"expected: slipstream doctor --server run\.toml",
        (
            "plan",
            RECIPE,
            "--gpus",
            "many",
        ): r"argument --gpus: many is not an integer of 1 or more; see slipstream plan --help",
        ("colocate", RECIPE, "--resum"): r"unknown flag --resum; did you mean --resume\?",
        ("keys",): r"required: DIR; see slipstream keys --help",
        ("--quiet", "report", "nowhere"): r"nowhere is not a run directory",
    }
    for done, expected in zip(slipstream(*mistakes), mistakes.values(), strict=True):
        assert (done.code, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert re.fullmatch(f"error: .*{expected}.*", line), line


def test_a_config_is_read_and_shown_in_any_locale(tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text(
        Path(RECIPE).read_text("utf-8").replace("[learner.data]\n", "[learner.data]\nsystem_prompt = 'Δ'\n")
    )
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # ASCII, which is not UTF-8
    command = [sys.executable, "-c", SCRIPT, "train", str(recipe), "--dry-run"]
    shown = subprocess.run(command, cwd=ROOT, env=os.environ | locale, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert 'system_prompt = "\\u0394"' in shown.stdout


def test_a_command_loads_only_what_it_needs() -> None:
    for command in (["report", "nowhere"], ["new", "--help"]):
        assert not loaded_by(*command) & {"torch", "vllm", "transformers", "inference_server"}
    assert not loaded_by("serve", RECIPE, "--dry-run") & {"learner", "torch", "vllm"}
    assert not loaded_by("train", RECIPE, "--dry-run") & {"inference_server", "torch", "vllm"}


def test_a_warning_about_the_config_is_json_too() -> None:
    rates = ["--lengths", *"12324", "--decode", "1:9", "8:50", "--train-tokens-per-s", "9"]
    commands = [
        ["serve", RECIPE], ["train", RECIPE], ["doctor", RECIPE, "--server"], ["colocate", RECIPE],
        ["plan", RECIPE, "--gpus", "2", *rates],
    ]  # fmt: skip
    for done in slipstream(*([*command, "--json-logs"] for command in commands), first=WARN_AND_FAIL):
        logged = [json.loads(line) for line in done.stderr.splitlines()]
        assert [(one["level"], one["message"]) for one in logged] == [("WARNING", "old key"), ("ERROR", "new key")]


def test_each_side_has_its_doctor() -> None:
    examined = ["doctor", RECIPE, "--server", "--endpoint", "tcp://127.0.0.1:1", "--json"]
    of_learner, of_server, found = (
        done.stdout for done in slipstream(["doctor", "--help"], ["doctor", "--server", "--help"], examined)
    )
    assert "[--server]" not in of_learner and "`slipstream doctor --server` examines" in of_learner
    assert "--learner.steps" in of_learner and "--server.http-port" not in of_learner
    assert "--server.http-port" in of_server and "--learner.steps" not in of_server
    assert '"subject":"port"' in found and '"subject":"http"' in found


@pytest.fixture
def installed(shadowing_user_files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command as pip installs it, in a directory with modules of our packages' names."""
    script = tmp_path_factory.mktemp("bin") / "slipstream"
    script.write_text(SCRIPT)
    return [sys.executable, str(script)]


def test_a_users_own_modules_disturb_neither_a_command_nor_what_colocate_starts(
    installed: list[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        flags = ["--run-dir", str(tmp_path / "run"), "--endpoint", endpoint, "--learner.report.dashboard-port", "0"]
        done = subprocess.run([*installed, "colocate", RECIPE, *flags], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and "the user's own" not in done.stdout + done.stderr
    assert re.search(rf"^ *server \| error: .*{endpoint}", done.stdout, re.MULTILINE), done.stdout
