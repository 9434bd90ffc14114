"""`learner new`: both programs accept its files, its reward passes its test, and nothing is overwritten."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inference_server.config import ServerRun
from learner.config import LearnerRun
from learner.prompts.sources import open_source
from learner.sandbox.user_code import load_named
from learner.starter.starter import write_starter
from protocol.config import load_config
from protocol.errors import ConfigError
from tests.learner.in_process import run_here


def test_the_recipe_is_valid_for_both_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = write_starter(Path("tasks/MY_TASK_2"))
    assert {path.name for path in Path("tasks/MY_TASK_2").iterdir()} == {
        "prompts.jsonl", "reward.py", "run.toml", "test_reward.py",
    }  # fmt: skip
    learner = load_config(LearnerRun, ["tasks/MY_TASK_2/run.toml"], "learner train")
    server = load_config(ServerRun, ["tasks/MY_TASK_2/run.toml"], "inference-server")
    assert (
        learner.model == server.model
        and learner.run_dir == "runs/MY_TASK_2"
        and "runs/MY_TASK_2/report.html" in printed
    )
    assert learner.idle_keys_note() is None
    assert len(open_source(learner.learner.data, 0)) == 3
    (spec,) = learner.learner.reward.functions
    assert load_named(spec)(completions=["371", "37", ""], answer=["371"] * 3) == [1.0, 0.5, 0.0]


def outcome_of(directory: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", directory.name]
    environment = {"PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # saves half of pytest's start
    return subprocess.run(
        command, cwd=directory.parent, env=environment, capture_output=True, text=True, timeout=240
    ).stdout


def test_the_generated_test_passes_and_finds_a_broken_reward(tmp_path: Path) -> None:
    assert run_here("new", str(tmp_path / "mine")).stdout.startswith(f"wrote {tmp_path}/mine/: prompts.jsonl")
    assert "3 passed" in outcome_of(tmp_path / "mine")
    reward = tmp_path / "mine" / "reward.py"
    reward.write_text(reward.read_text().replace("(len(text) == len(right))", "1"))
    assert "3 failed" in outcome_of(tmp_path / "mine"), "the end of the text no longer counts"


def test_nothing_that_exists_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="mine exists; choose a directory that does not exist"):
        write_starter(tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_starter(tmp_path / "file" / "mine")
    for name in ('a"b', "a\\b", "a\nb", "a\rb", "a\x7fb", "a\udce9b"):
        with pytest.raises(ConfigError, match="choose a name of printable characters"):
            write_starter(tmp_path / name)
        assert not (tmp_path / name).exists()


def test_the_recipe_supports_names_with_special_characters(tmp_path: Path) -> None:
    printed = write_starter(tmp_path / "Größe + 1")
    assert f"pytest '{tmp_path}/Größe + 1' " in printed and f"colocate '{tmp_path}/Größe + 1/run.toml' " in printed
    recipe = tomllib.loads((tmp_path / "Größe + 1" / "run.toml").read_text())
    assert recipe["learner"]["data"]["path"] == str(tmp_path / "Größe + 1" / "prompts.jsonl")
    assert recipe["run_dir"] == "runs/Größe + 1"
