"""Output of the programs: lines for people, JSON for machines, less with --quiet, colors only on terminals."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol import console
from protocol.config import to_toml
from protocol.model_files import resolve_model
from tests.learner.forked_learner import run_learner
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.runs import make_run

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    yield
    console.pop_switches([])


def run(code: str, folder: Path = ROOT, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, text=True, timeout=60, env=environment,
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options),
    )  # fmt: skip


@pytest.mark.system  # a learner in a process of its own
def test_every_line_of_a_run_is_json_for_machines(tmp_path: Path) -> None:
    """Run a few steps, with a checkpoint and a report at the end."""
    with tiny_server(ModelEngine(resolve_model("tiny:digits"))) as server:
        config = make_run(tmp_path, server.endpoint, evaluation={"every_steps": 2, "timeout_s": 0.5})
        (tmp_path / "run.toml").write_text(to_toml(config))
        done = run_learner("train", str(tmp_path / "run.toml"), "--json-logs")
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in (done.stdout + done.stderr).splitlines()]
    assert all({"time", "level", "message"} <= one.keys() for one in told)
    steps = [one for one in told if "reward/mean" in one]
    assert [one["step"] for one in steps] == [1, 2, 3, 4] and steps[0]["message"].startswith("Step 1/4 |")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    of_step = {line["step"]: line for line in lines}
    assert steps[1]["reward/mean"] == of_step[2]["reward/mean"]
    assert any(one["level"] == "WARNING" and "the evaluation after step 2 failed" in one["message"] for one in told)
    assert any("report: " in one["message"] for one in told) and (tmp_path / "run/report.html").is_file()


QUIET = """
import logging
from protocol import console
assert console.pop_switches(["--quiet", "run.toml"]) == ["run.toml"]
console.start_logging()
logging.info("as usual")
console.say("Step 1")
logging.warning("look out")
"""


def test_only_warnings_are_printed_with_quiet() -> None:
    done = run(QUIET)
    assert done.stdout == "" and done.stderr.endswith(" WARNING look out\n") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("learner", "train"), ("inference_server",)], ids=" ".join)
def test_an_error_is_json_too(tmp_path: Path, command: tuple[str, ...]) -> None:
    words = [sys.executable, "-m", *command, str(tmp_path / "absent.toml"), "--json-logs", "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    (said,) = map(json.loads, done.stderr.splitlines())
    assert said["level"] == "ERROR" and said["message"].startswith("config file ")


def test_switches_can_be_anywhere_and_are_not_config_flags() -> None:
    assert console.pop_switches(["--quiet", "train", "run.toml", "--json-logs", "--seed", "3"]) == [
        "train", "run.toml", "--seed", "3"
    ]  # fmt: skip
    assert (
        console.output_mode() == console.OutputMode(is_quiet=True, is_json=True) and not console.output_mode().has_bars
    )
    assert console.pop_switches(["runs"]) == ["runs"] and console.output_mode() == console.OutputMode()


def test_values_without_a_json_form_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    console.pop_switches(["--json-logs"])
    console.say("Step 1 – ε", {"reward/mean": float("nan"), "loss/policy": float("-inf"), "step": 1})
    said = capsys.readouterr().out
    assert json.loads(said)["reward/mean"] is None and '"loss/policy": null' in said and "Step 1 – ε" in said


def test_colors_are_used_on_terminals_unless_disabled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "w") as terminal, (tmp_path / "file").open("w") as file:
        assert console.supports_color(terminal) and not console.supports_color(file)
        monkeypatch.setenv("NO_COLOR", "1")
        assert not console.supports_color(terminal)
    record = logging.LogRecord("learner", logging.WARNING, "", 0, "look out", None, None)
    assert console.HumanFormatter("%(message)s", True).format(record) == "\033[33mlook out\033[0m"
    assert console.HumanFormatter("%(message)s", False).format(record) == "look out"


def test_a_count_of_one_has_a_noun_without_an_s() -> None:
    told = [console.counted(count, "group") for count in (0, 1, 2, 1000)]
    assert told == ["0 groups", "1 group", "2 groups", "1,000 groups"]


WITHOUT_READER = """
from protocol import console
console.start_logging()
with console.exit_on_user_error():
    console.say("Step 1")
    console.say("Step 2")
    open("went_on", "w").close()
"""
WITH_AN_END = """
import sys
from protocol import console
from protocol.errors import ConfigError
with console.exit_on_user_error():
    print("text that is still in the buffer")
    {end}
"""
WITHOUT_OUTPUT = """
import os, subprocess, sys
code = 'from protocol import console; context = console.exit_on_user_error()\\nwith context: print(1); console.say("2")'
sys.exit(subprocess.call([sys.executable, "-c", code], preexec_fn=lambda: os.close(1)))
"""
WITH_ANOTHER_PIPE = """
import os
from protocol import console
theirs, ours = os.pipe()
os.close(theirs)
with console.exit_on_user_error():
    os.write(ours, b"x")
"""


def run_without_reader(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    theirs, ours = os.pipe()
    os.close(theirs)
    with os.fdopen(ours, "w") as output:
        return run(code, folder, stdout=output)


def test_a_run_continues_when_the_reader_of_its_output_leaves(tmp_path: Path) -> None:
    done = run_without_reader(WITHOUT_READER, tmp_path)
    assert done.returncode == 0 and (tmp_path / "went_on").exists()
    (line,) = done.stderr.splitlines()
    assert "WARNING the output cannot be written ([Errno 32] Broken pipe); continuing without it" in line


def test_lines_of_other_processes_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    console.pop_switches(["--json-logs"])
    for line in ('{"level": "INFO", "message": "Δ"}', "{'not': 'JSON'}", "1"):
        console.relay("server", line)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {one["process"] for one in told} == {"server"}
    assert [one["message"] for one in told] == ["Δ", "{'not': 'JSON'}", "1"]


def test_another_broken_pipe_is_not_mistaken_for_the_output() -> None:
    done = run(WITH_ANOTHER_PIPE)
    assert done.returncode == 1 and "BrokenPipeError" in done.stderr


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("", 0, ""),
        ("print(flush=True)", 0, ""),
        ("raise ConfigError('no such key')", 2, "error: no such key\n"),
        ("raise RuntimeError('a defect')", 1, "RuntimeError: a defect\n"),
    ],
)
def test_an_output_without_a_reader_hides_no_error(end: str, code: int, message: str, tmp_path: Path) -> None:
    done = run_without_reader(WITH_AN_END.format(end=end), tmp_path)
    assert done.returncode == code and done.stderr.endswith(message)
    assert bool(done.stderr) == bool(message) and "BrokenPipeError" not in done.stderr


def test_a_command_runs_with_a_closed_output() -> None:
    done = run(WITHOUT_OUTPUT)
    assert (done.returncode, done.stderr) == (0, "")
