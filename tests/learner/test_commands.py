"""The learner's commands: every mistake of a user gives one clear error, exit code 2 and no traceback."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import learner.__main__
import learner.train
from deploy.placement import DeployRun
from inference_server.config import ServerRun
from learner.config import LearnerRun
from protocol.config import load_config
from protocol.errors import DeadlineExceeded
from tests.learner.forked_learner import end_of, run_learner, start_learner
from tests.ports import free_endpoint

ROOT = Path(__file__).parent.parent.parent
RECIPE = "deploy/recipes/reverse.toml"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], r"no config file was given; expected: slipstream train run\.toml"),
        (["train", "nowhere.toml"], r"config file nowhere\.toml does not exist"),
        (
            ["train", RECIPE, "--learner.kl.coef", "0.1"],
            r"learner\.kl\.coef = 0\.1 needs a reference; set reference\.kind",
        ),
        (
            ["doctor", RECIPE, "--server"],
            r"not a flag of the learner's doctor; use `slipstream doctor --server run\.toml`",
        ),
        (["report", "--json"], r"required: RUN_DIR; see slipstream report --help"),
        (["trian", RECIPE], r"unknown command 'trian'; expected one of .*; did you mean train\?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], expected: str) -> None:
    assert_refused(run_learner(*arguments), expected)


def test_a_server_that_does_not_come_in_time_is_one_line_and_the_exit_code_of_a_failure(tmp_path: Path) -> None:
    endpoint = free_endpoint()
    nobody = ["--run-dir", str(tmp_path / "run"), "--endpoint", endpoint, "--learner.connect-timeout-s", "1"]
    done = run_learner("train", RECIPE, *nobody, "--learner.report.dashboard-port", "0")
    expected = rf"no inference server answers at {endpoint} after 1 s; start one with `slipstream serve run\.toml`"
    assert_refused(done, expected, code=1)


def be_held_up_at_the_end() -> None:
    """Let training end with an error while a thread hangs, as in a write to a file system that is gone."""

    def train(_: LearnerRun, *, resume: bool) -> None:
        ThreadPoolExecutor(1).submit(time.sleep, 1000)
        raise DeadlineExceeded("the checkpoint was not written")

    learner.__main__.END_S = 0.5
    learner.train.train = train


def test_a_thread_that_hangs_does_not_keep_a_learner_that_failed_from_ending(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start_learner(("train", RECIPE), log, log, be_held_up_at_the_end)
    assert end_of(process, log, timeout_s=20) == 1
    assert log.read_text().endswith("error: the checkpoint was not written\n")


def assert_refused(done: subprocess.CompletedProcess[str], expected: str, code: int = 2) -> None:
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(f"^error: .*{expected}", last), done.stderr


def test_a_pipe_that_closes_early_is_not_an_error() -> None:
    theirs, ours = os.pipe()
    os.close(theirs)  # no reader at all, because `| head -1` would read all of a short output
    with os.fdopen(ours, "w") as output:
        started = [
            subprocess.Popen([sys.executable, "-m", *command.split()], cwd=ROOT, stdout=output, stderr=subprocess.PIPE)
            for command in (
                "deploy.cli --help",
                f"learner train {RECIPE} --dry-run",
                f"inference_server {RECIPE} --dry-run",
            )
        ]
        for process in started:
            _, errors = process.communicate(timeout=120)
            assert (process.returncode, errors) == (0, b""), process.args


@pytest.mark.parametrize("run", [LearnerRun, ServerRun, DeployRun])
def test_every_recipe_is_valid_for_both_sides(run: type[LearnerRun | ServerRun | DeployRun]) -> None:
    recipes = sorted((ROOT / "deploy" / "recipes").glob("*.toml"))
    assert recipes and all(isinstance(load_config(run, [str(recipe)], "slipstream"), run) for recipe in recipes)
