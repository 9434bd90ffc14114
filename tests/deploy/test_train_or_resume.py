"""The scripts that start a learner again, with commands that only write down what becomes of them: nothing is lost
by a signal."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from learner.config import LearnerRun
from tests.deploy.commands import DEPLOY, ROOT, check, tool

TIMEOUT_S = 60.0
SCRIPT = str(DEPLOY / "train_or_resume.sh")
JOB = str(DEPLOY / "slurm/slipstream.sbatch")
AGAIN = 75
"""Exit status of a learner that a signal has ended."""

LIVE = """
trap 'echo "{name} TERM" >> "$STORY"; [ -n "${KEEPS_ON:-}" ] || exit "${DIES_WITH:-0}"' TERM
echo "{name} begins" >> "$STORY"
while [ ! -e "$STORY.{name}-ends" ]; do sleep 0.05; done
exit "$(cat "$STORY.{name}-ends")"
"""
WRITE_DOWN = """
printf "%s\\n" "{name}" "$@" "" > "$STORY.words.$$"
cat "$STORY.words.$$" >> "$STORY.words"  # at once: bash writes line by line, between those of other commands
"""
LAUNCH = """
trap 'echo "accelerate TERM" >> "$STORY"' TERM
while [ "$1" != --no_python ]; do shift; done
shift
"$@" &
wait "$!"
"""
KEY = '\necho "{name} key ${EVALUATION_API_KEY:-}" >> "$STORY.keys"\n'
COMMANDS = {
    "slipstream": '\nif [ "${!#}" = --dry-run ]; then echo checked >> "$STORY"; '
    'while [ -n "${CHECK_WAITS:-}" ] && [ ! -e "$STORY.may-end-check" ]; do sleep 0.05; done; '
    'exit "${CHECK:-0}"; fi'
    '\nif [ "$1" = serve ]; then exec inference-server "$@"; else exec learner "$@"; fi\n',
    "learner": KEY + 'mkdir -p "$4" && touch "$4/config.toml"' + WRITE_DOWN + LIVE,
    "inference-server": KEY.replace("EVALUATION", "VLLM") + WRITE_DOWN + LIVE,
    "accelerate": WRITE_DOWN + LAUNCH,
    "srun": '\nwhile [ "${1#--}" != "$1" ]; do shift; done; exec "$@"\n',
    "scontrol": '\nif [ "$1" = show ]; then printf "%s\\n" ${JOB_NODES:-node1 node2}; else echo "scontrol $*" >> '
    '"$STORY"; fi\n',
}


class Stage:
    """A folder with these commands in it, and what they have done."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.story_file = folder / "run", folder / "story"
        (folder / "bin").mkdir()
        for name, body in COMMANDS.items():
            command = folder / "bin" / name
            command.write_text("#!/bin/bash\n" + body.replace("{name}", name))
            command.chmod(0o755)
        path = f"{folder / 'bin'}:{os.environ['PATH']}"
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": str(ROOT)}
        self.environment = os.environ | job | {"PATH": path, "STORY": str(self.story_file), "HOME": str(folder)}

    def story(self) -> list[str]:
        return self.story_file.read_text().splitlines() if self.story_file.exists() else []

    def words(self) -> list[list[str]]:
        """Of each command that was started, with its name."""
        text = self.story_file.with_name("story.words").read_text()
        return [part.split("\n") for part in text.strip("\n").split("\n\n")]

    def end(self, name: str, status: int) -> None:
        self.story_file.with_name(f"story.{name}-ends").write_text(str(status))

    def wait_for(self, *events: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not set(events) <= set(self.story()):
            assert time.monotonic() < deadline, f"{events} did not come: {self.story()}"
            time.sleep(0.02)

    def wait_for_times(self, event: str, count: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.story().count(event) < count:
            assert time.monotonic() < deadline, f"{event} did not come {count} times: {self.story()}"
            time.sleep(0.02)

    @contextmanager
    def play(self, script: str, *flags: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        command = ["bash", script, "run.toml", str(self.run_dir), *flags]
        process = subprocess.Popen(
            command, env=self.environment | environment, start_new_session=True, preexec_fn=_hear_every_signal
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for left in psutil.process_iter(["cmdline"]):  # in sessions of their own
                if any(str(self.run_dir) in word for word in left.info["cmdline"] or ()):
                    left.kill()


def _hear_every_signal() -> None:
    """A shell cannot trap what was ignored when it began, as nohup has it with SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def run(stage: Stage, script: str, *flags: str, **environment: str) -> int:
    """Of a script whose commands end by themselves."""
    with stage.play(script, *flags, **environment) as process:
        return process.wait(TIMEOUT_S)


def test_the_first_start_begins_a_run_and_the_second_goes_on_with_it_and_what_it_ends_with_is_passed_on(
    stage: Stage,
) -> None:
    for status in (0, 1):
        stage.end("learner", status)
        assert run(stage, SCRIPT, "--learner.steps", "3") == status
    first, second = stage.words()
    assert first == ["learner", "train", "run.toml", "--run-dir", str(stage.run_dir), "--learner.steps", "3"]
    assert [word for word in second if word not in first] == ["--resume"]
    for words in (first, second):
        taken = check(["slipstream", *words[1:]])
        assert isinstance(taken, LearnerRun) and taken.learner.steps == 3


def test_a_signal_reaches_the_learner_once_and_asks_for_another_start(stage: Stage) -> None:
    with stage.play(SCRIPT) as script:
        stage.wait_for("learner begins")
        script.terminate()
        assert script.wait(TIMEOUT_S) == AGAIN
    assert stage.story() == ["learner begins", "learner TERM"]


def test_a_terminal_that_closes_says_so_twice_to_the_group_and_the_learner_hears_it_once(stage: Stage) -> None:
    with stage.play(SCRIPT, KEEPS_ON="yes") as script:
        stage.wait_for("learner begins")
        os.killpg(script.pid, signal.SIGHUP)
        stage.wait_for("learner TERM")
        os.killpg(script.pid, signal.SIGHUP)
        time.sleep(0.5)  # in which nothing happens
        stage.end("learner", 0)
        assert script.wait(TIMEOUT_S) == AGAIN
    assert stage.story() == ["learner begins", "learner TERM"]


@pytest.mark.parametrize(("status", "expected"), [(143, AGAIN), (2, 2)])
def test_a_learner_that_a_signal_ends_out_of_order_is_started_again_unless_it_says_why(
    stage: Stage, status: int, expected: int
) -> None:
    with stage.play(SCRIPT, DIES_WITH=str(status)) as script:
        stage.wait_for("learner begins")
        script.terminate()
        assert script.wait(TIMEOUT_S) == expected


def test_several_ranks_are_started_by_accelerate_and_the_signal_reaches_them_without_it(stage: Stage) -> None:
    """accelerate, like torchrun, would kill its ranks after 30 s."""
    with stage.play(SCRIPT, RANKS="4") as script:
        stage.wait_for("learner begins")
        script.terminate()
        assert script.wait(TIMEOUT_S) == AGAIN
    assert stage.story() == ["checked", "learner begins", "learner TERM"]
    words, _ = stage.words()
    assert words[:6] == ["accelerate", "launch", "--multi_gpu", "--num-processes", "4", "--no_python"]
    check(words[6:])


def test_an_error_in_the_config_ends_several_ranks_once_because_their_launcher_hides_its_status(stage: Stage) -> None:
    assert run(stage, SCRIPT, "--learner.steps", "3", RANKS="4", CHECK="2") == 2
    assert stage.story() == ["checked"]


def test_a_signal_during_the_check_of_the_config_asks_for_another_start(stage: Stage) -> None:
    with stage.play(SCRIPT, RANKS="4", CHECK_WAITS="yes") as script:
        stage.wait_for("checked")
        script.terminate()
        stage.story_file.with_name("story.may-end-check").touch()
        assert script.wait(TIMEOUT_S) == AGAIN
    assert stage.story() == ["checked"]


def test_a_job_ends_its_server_once_the_learner_is_done(stage: Stage) -> None:
    with stage.play(JOB, "--learner.steps", "3") as job:
        stage.wait_for("inference-server begins", "learner begins")
        stage.end("learner", 0)
        assert job.wait(TIMEOUT_S) == 0
    assert stage.story()[2:] == ["inference-server TERM"]
    runs = {name: check(["slipstream", *words]) for name, *words in stage.words()}
    assert runs["inference-server"].endpoint == "tcp://*:10014" and runs["learner"].endpoint == "tcp://node1:10014"
    assert runs["inference-server"].keys == runs["learner"].keys is not None
    http = runs["inference-server"].server
    assert (http.http_host, runs["learner"].evaluation_url) == ("0.0.0.0", f"http://node1:{http.http_port}/v1")
    keys = dict(line.split(" key ") for line in stage.story_file.with_name("story.keys").read_text().splitlines())
    assert len(keys["inference-server"]) == 48 and keys["learner"] == keys["inference-server"]


def test_a_job_of_several_nodes_has_servers_and_ranks_and_ends_with_the_first_of_these(stage: Stage) -> None:
    split = {"JOB_NODES": "n0 n1 n2 n3", "NODES_PER_SERVER": "2", "RANKS": "2", "SERVERS": "1"}
    with stage.play(JOB, "--server.tensor-parallel-size", "2", **split) as job:
        stage.wait_for_times("inference-server begins", 2)
        stage.wait_for_times("learner begins", 2)
        stage.end("learner", 0)
        assert job.wait(TIMEOUT_S) == 0
    assert sorted(event for event in stage.story() if "begins" not in event) == [
        "checked", "checked", *["inference-server TERM"] * 2,
    ]  # fmt: skip
    servers = [check(["slipstream", *words]) for name, *words in stage.words() if name == "inference-server"]
    assert sorted((run.server.node_rank, run.server.master_addr) for run in servers) == [(0, "n0"), (1, "n0")]
    launches = sorted(words for words in stage.words() if words[0] == "accelerate")
    assert [words[words.index("--machine-rank") + 1] for words in launches] == ["0", "1"]
    assert {words[words.index("--main-process-ip") + 1] for words in launches} == {"n2"}
    assert {words[words.index("--num-processes") + 1] for words in launches} == {"4"}
    assert run(stage, JOB, JOB_NODES="n0 n1", NODES_PER_SERVER="2") == 2


def test_a_job_near_its_time_limit_is_queued_again_after_the_checkpoint_and_resumes(stage: Stage) -> None:
    with stage.play(JOB) as job:
        stage.wait_for("inference-server begins", "learner begins")
        job.send_signal(signal.SIGUSR1)
        assert job.wait(TIMEOUT_S) == 0
    assert stage.story()[2:] == ["learner TERM", "inference-server TERM", "scontrol requeue 7"]
    stage.end("learner", 0)
    assert run(stage, JOB) == 0
    assert "--resume" in next(words for words in reversed(stage.words()) if words[0] == "learner")


def test_a_job_whose_server_ends_first_ends_the_learner_with_a_checkpoint_and_fails(stage: Stage) -> None:
    with stage.play(JOB) as job:
        stage.wait_for("inference-server begins", "learner begins")
        stage.end("inference-server", 0)
        assert job.wait(TIMEOUT_S) == 1
    assert stage.story()[2:] == ["learner TERM"]


def test_a_job_whose_learner_fails_is_not_queued_again(stage: Stage) -> None:
    stage.end("learner", 2)
    assert run(stage, JOB) == 2
    assert "scontrol requeue 7" not in stage.story()


def test_shellcheck_has_no_complaint_and_without_arguments_both_say_what_they_take() -> None:
    done = subprocess.run([tool("shellcheck"), JOB, *map(str, DEPLOY.rglob("*.sh"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for script in (SCRIPT, JOB, str(DEPLOY / "serve_or_train.sh")):
        done = subprocess.run(["bash", script], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("usage: ")


def test_the_directives_of_the_job_are_ones_that_requeue_it() -> None:
    directives = [line.split()[1] for line in Path(JOB).read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--signal=B:USR1@600", "--open-mode=append"} <= set(directives)
