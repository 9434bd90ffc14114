"""The learner's commands as a user types them: every mistake gets one clear sentence, exit code 2 and no traceback."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from tests.learner.forked_learner import run_learner
from tests.learner.model_engine import tiny_server
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
RECIPE = "deploy/recipes/reverse.toml"


def assert_refused(done: subprocess.CompletedProcess[str], expected: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(f"^error: .*{expected}", last), done.stderr


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def test_an_unknown_key_in_the_file(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text((ROOT / RECIPE).read_text().replace("max_staleness", "max_stalenes"))
    assert_refused(
        run_learner("train", str(config)),
        r"unknown key learner\.max_stalenes = 2; did you mean learner\.max_staleness\?",
    )


@pytest.mark.parametrize(
    "command",
    [
        "deploy.cli --help",
        "deploy.cli --version",
        "learner --help",
        "inference_server --version",
        "learner train --help",
        f"learner train {RECIPE} --dry-run",
        f"inference_server {RECIPE} --dry-run",
        f"deploy.cli colocate {RECIPE} --dry-run",
        f"deploy.cli doctor {RECIPE}",
        f"deploy.cli doctor {RECIPE} --server --json",
        "deploy.cli keys {directory}/keys",
        "deploy.cli new {directory}/task",
    ],
)
def test_a_pipe_that_closes_early_is_no_error(tmp_path: Path, command: str) -> None:
    words = [sys.executable, "-m", *command.format(directory=tmp_path).split()]
    theirs, ours = os.pipe()
    os.close(theirs)  # nobody reads at all, where `| head -1` would read the whole of a short output
    with os.fdopen(ours, "w") as output:
        done = subprocess.run(words, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_of_a_command_is_that_of_the_program() -> None:
    assert run_learner("train", "--version").stdout == run_learner("--version").stdout != ""


def test_help_of_the_report_names_its_arguments() -> None:
    assert "slipstream report [-h] [--json] RUN_DIR [RUN_DIR ...]" in run_learner("report", "--help").stdout


@pytest.mark.parametrize(
    ("command", "purpose"),
    [("train", "Train"), ("check", "Show the first prompts"), ("evaluate", "Ask a server"), ("doctor", "Look for"), ("self-test", "Measure")],
)  # fmt: skip
def test_help_of_a_command_says_what_it_does_above_its_keys(command: str, purpose: str) -> None:
    printed = run_learner(command, "--help").stdout
    assert re.match(rf"usage: slipstream {command} run\.toml [^\n]*\n\n{purpose}", printed), printed[:300]
    assert "--learner.steps" in printed


def test_a_contradiction_between_keys() -> None:
    flags = ["--learner.kl.coef", "0.1"]
    assert_refused(
        run_learner("train", RECIPE, *flags), r"learner\.kl\.coef = 0\.1 needs a reference; set reference\.kind"
    )


def test_a_setting_that_does_nothing() -> None:
    done = run_learner("train", RECIPE, "--dry-run", "--learner.reference.kind", "fixed")
    assert done.returncode == 0 and 'kind = "fixed"' in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.endswith(
        "WARNING these keys have no effect alongside the others: learner.reference.kind = 'fixed' (needs kl.coef above 0)"
    )


def test_a_server_that_is_not_running(tmp_path: Path) -> None:
    flags = ["--run-dir", str(tmp_path / "run"), "--endpoint", (endpoint := free_endpoint())]
    done = run_learner(
        "train", RECIPE, *flags, "--learner.connect-timeout-s", "1", "--learner.report.dashboard-port", "0"
    )
    assert_refused(
        done, rf"no inference server answers at {endpoint} after 1 s; start one with `slipstream serve run\.toml`"
    )


def test_a_dataset_without_the_named_column(tmp_path: Path) -> None:
    Dataset.from_list([{"question": "1+1", "answer": "2"}]).save_to_disk(tmp_path / "data")
    config = tmp_path / "run.toml"
    recipe = (ROOT / RECIPE).read_text()
    config.write_text(
        re.sub(r'task = "reverse"\nnum_digits = 8\nnum_prompts = 4096', f'dataset = "{tmp_path}/data"', recipe)
    )
    done = run_learner("train", str(config), "--run-dir", str(tmp_path / "run"), "--learner.report.dashboard-port", "0")
    assert_refused(done, r"no column 'prompt'; its columns are: question, answer\. Set learner\.data\.prompt_column")


def test_a_run_directory_that_belongs_to_another_config(tmp_path: Path) -> None:
    flags = ["--run-dir", str(tmp_path / "run"), "--learner.report.dashboard-port", "0", "--learner.steps", "1"]
    with tiny_server() as server:
        flags += ["--endpoint", server.endpoint, "--learner.groups-per-step", "2"]
        first = run_learner("train", RECIPE, *flags)
        assert first.returncode == 0, first.stderr
    assert_refused(run_learner("train", RECIPE, *flags), r"already contains a run; continue it with --resume")
    other = run_learner("train", RECIPE, *flags, "--resume", "--learner.optimizer.beta2", "0.99")
    assert_refused(other, r"another config: learner\.optimizer\.beta2 was 0\.95, is 0\.99\. Restore")
    report = run_learner("report", str(tmp_path / "run"), "--json")
    assert json.loads(report.stdout)["groups_consumed"] == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], r"no config file was given; expected: slipstream train run\.toml"),
        (
            ["doctor", RECIPE, "--server"],
            r"not a flag of the learner's doctor; use `slipstream doctor --server run\.toml`",
        ),
        (["train", "nowhere.toml"], r"config file nowhere\.toml does not exist"),
        (["report", "nowhere"], r"nowhere"),
        (["self-test", "--json"], r"no config file was given; expected: slipstream self-test run\.toml"),
        (["report", "--json"], r"required: RUN_DIR; see slipstream report --help"),
        (["trian", RECIPE], r"unknown command 'trian'; expected one of .*; did you mean train\?"),
    ],
)
def test_a_command_that_cannot_be_understood(arguments: list[str], expected: str) -> None:
    done = run_learner(*arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(expected, done.stderr), done.stderr


@pytest.mark.parametrize("recipe", sorted((ROOT / "deploy" / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid_for_both_sides(recipe: Path) -> None:
    done = run_learner("train", str(recipe), "--dry-run")
    assert done.returncode == 0 and "[learner.data]" in done.stdout, done.stderr
    command = [sys.executable, "-m", "deploy.cli", "colocate", str(recipe), "--dry-run"]
    both = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert both.returncode == 0 and "[server]" in both.stdout, both.stderr
