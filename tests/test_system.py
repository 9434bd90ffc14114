"""The user's commands on real vLLM: two processes, real sockets, kills in the middle; judged by what they leave behind."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import openai
import psutil
import pytest

from inference_server.config import ServerRun
from learner.config import LearnerRun
from learner.evaluation.eval_sets import EvalSet
from learner.evaluation.results import FILE, earlier
from learner.rewards.builtin.text import share_right
from learner.run_inputs import RunInputs
from protocol.config import load_config
from protocol.endpoint import END, START
from protocol.hardware import has_gpu
from protocol.messages import Sampling
from tests.bench.bare_vllm import BareVllm, Order
from tests.inference_server.forked_server import ForkedServer
from tests.learner.forked_learner import end_of, run_learner, start_learner
from tests.ports import free_port

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent
RECIPE = "deploy/recipes/reverse.toml"
TIMEOUT_S = 240


class Server:
    """`inference-server` on ports of its own, forked, so that its imports cost nothing."""

    def __init__(self, log: Path) -> None:
        self.port, self.http_port, self.log = free_port(), free_port(), log
        self._num_started = 0
        log.touch()
        self.shared = ["--endpoint", f"tcp://127.0.0.1:{self.port}"]
        self.start()

    def start(self) -> None:
        self._num_started += 1
        arguments = [RECIPE, *self.shared, "--server.http-port", str(self.http_port)]
        self._process = ForkedServer("inference_server", arguments, self.log)

    def wait_until_ready(self) -> None:
        """Wait for the one that was started last."""
        deadline = time.monotonic() + TIMEOUT_S
        while self.log.read_text().count("ready after") < self._num_started:
            assert self._process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL the server's process alone, and see vLLM's processes end with it."""
        children = psutil.Process(self.pid).children(recursive=True)
        assert children
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(TIMEOUT_S)
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(TIMEOUT_S)


@pytest.fixture(scope="module")
def starting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server") / "server.log")
    yield server
    assert server.stop() == 0


@pytest.fixture
def server(starting_server: Server) -> Server:
    starting_server.wait_until_ready()
    return starting_server


class Learner:
    """`learner train` on a server, forked, so that its imports cost nothing; what it writes is in a log beside its run."""

    def __init__(self, server: Server, run_dir: Path, *flags: str) -> None:
        small = ["--learner.data.num-prompts", "16", "--learner.groups-per-step", "4"]
        small += ["--learner.checkpoint.every-steps", "3", "--learner.report.dashboard-port", "0"]
        self.run_dir, self._log = run_dir, run_dir.with_suffix(".log")
        arguments = ("train", RECIPE, *server.shared, "--run-dir", str(run_dir), *small, *flags)
        self.process = start_learner(arguments, self._log, self._log)

    def steps_done(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.steps_done() < step:
            assert self.process.is_alive(), self._log.read_text()
            assert time.monotonic() < deadline, f"step {step} was not reached"
            time.sleep(0.05)

    def finish(self) -> str:
        """Wait for its end; return what it wrote, and those before it in the same directory."""
        code, output = end_of(self.process, self._log, TIMEOUT_S), self._log.read_text()
        assert code == 0, output
        return output


def report_of(run_dir: Path) -> dict[str, float]:
    done = run_learner("report", str(run_dir), "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_every_group_is_accounted_for(run_dir: Path, num_steps: int) -> None:
    """Each prompt once per epoch of the data, four groups to every step, nothing left over."""
    with sqlite3.connect(run_dir / "ledger.db") as ledger:
        consumed = ledger.execute("SELECT epoch, prompt_id FROM groups WHERE state = 'consumed'").fetchall()
        per_step = ledger.execute("SELECT step, count(*) FROM groups WHERE state = 'consumed' GROUP BY step").fetchall()
    assert len(consumed) == len(set(consumed)) == 4 * num_steps
    assert per_step == [(step, 4) for step in range(1, num_steps + 1)]
    report = report_of(run_dir)
    assert (report["groups_lost"], report["groups_outstanding"], report["steps"]) == (0, 0, num_steps)


@pytest.mark.slow
def test_a_server_killed_in_the_middle_comes_back_and_the_run_goes_on(starting_server: Server, tmp_path: Path) -> None:
    server = starting_server  # by the first test: the learner is started at the same moment and waits
    learner = Learner(server, tmp_path / "run", "--learner.steps", "60")
    learner.wait_for_step(3)
    server.kill()
    server.start()
    output = learner.finish()
    assert "lost the server" in output or "went away" in output
    assert_every_group_is_accounted_for(tmp_path / "run", 60)


def test_two_sides_that_got_no_cores_run_on_a_half_each(server: Server, tmp_path: Path) -> None:
    learner = Learner(server, tmp_path / "run", "--learner.steps", "4")
    learner.wait_for_step(1)
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if half and not has_gpu():
        assert learner.process.pid is not None
        assert psutil.Process(learner.process.pid).cpu_affinity() == cores[half:]
        children = psutil.Process(server.pid).children()
        (engine,) = (child for child in children if "EngineCore" in " ".join(child.cmdline()))
        assert engine.cpu_affinity() == cores[:half]
        assert "so that the learner has its own; server.cpu_cores overrides this" in server.log.read_text()
    learner.finish()


def test_a_run_trains_while_an_openai_client_is_served_and_a_second_run_follows(server: Server, tmp_path: Path) -> None:
    learner = Learner(server, tmp_path / "first", "--learner.steps", "12")
    learner.wait_for_step(2)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.http_port}/v1", api_key="none") as client:
        said = client.completions.with_raw_response.create(model="tiny:digits", prompt="12345678>", max_tokens=9)
    assert learner.process.is_alive() and re.fullmatch(r"[0-9>+=, ]{0,9}", said.parse().choices[0].text)
    assert 1 <= int(said.headers[START]) <= int(said.headers[END]) <= 12
    asked = ["--learner.data.num-prompts", "16", "--learner.evaluation.url", f"http://127.0.0.1:{server.http_port}/v1"]
    done = run_learner("evaluate", RECIPE, "--run-dir", str(tmp_path / "evaluated"), *asked, "--json")
    assert done.returncode == 0, done.stderr
    evaluated = json.loads(done.stdout)
    assert evaluated["num_prompts"] == len(evaluated["rewards_P"]) == 16 and 0 < evaluated["length_mean"] <= 9
    assert 1 <= evaluated["versions"][0] <= evaluated["versions"][1] <= 12
    output = learner.finish()
    assert "Step 12/12" in output and "0 lost" in output and "report.html" in output
    assert_every_group_is_accounted_for(tmp_path / "first", 12)  # 48 groups: 3 epochs of 16 prompts
    report = report_of(tmp_path / "first")
    assert report["mismatch_mean_abs_logprob"] <= 1e-4 and report["staleness_max"] <= 2

    Learner(server, tmp_path / "second", "--learner.steps", "4", "--learner.max-staleness", "0").finish()
    metrics = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    # At staleness 0 every token is sampled by the very weights that are trained: vLLM's logprobs are the learner's.
    assert all(line["staleness/max"] == 0 and line["policy/mismatch_abs_logprob"] <= 1e-5 for line in metrics)
    assert all(line["loss/clipped_frac"] == 0 and abs(line["policy/behaviour_kl"]) <= 1e-6 for line in metrics)


def test_a_pinned_evaluation_of_a_run_gives_what_plain_vllm_gives_with_the_exported_model(
    server: Server, tmp_path: Path
) -> None:
    flags = ["--learner.steps", "12", "--learner.checkpoint.every-steps", "6", "--learner.checkpoint.keep-last", "0"]
    flags += [
        "--learner.evaluation.every-steps",
        "2",
        "--learner.evaluation.num-prompts",
        "64",
        "--learner.evaluation.pin-policy",
    ]
    flags += ["--learner.evaluation.url", f"http://127.0.0.1:{server.http_port}/v1"]
    flags += ["--learner.evaluation.task", "reverse", "--learner.parity.every-steps", "1"]
    Learner(server, tmp_path / "run", *flags).finish()
    made = earlier(tmp_path / "run" / FILE)
    assert [(one.step, one.versions, one.num_prompts) for one in made] == [(i, (i, i), 64) for i in range(2, 13, 2)]

    run = load_config(LearnerRun, [str(tmp_path / "run/config.toml")], "test").in_effect()
    eval_set = EvalSet(RunInputs(run))
    served = load_config(ServerRun, [RECIPE, "--model", str(tmp_path / "run/checkpoints/step-000006/model")], "test")
    eos = eval_set.tokenizer.eos_token_id
    order = Order(
        [one.token_ids for one in eval_set.prompts], [Sampling(num_completions=1, max_tokens=9, temperature=0.0)] * 64
    )
    with closing(BareVllm(served, eos)) as plain:
        answers = [ids for (ids,) in plain.generate(order).token_ids]
    texts = [eval_set.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    gold = [one.columns["answer"] for one in eval_set.prompts]
    rewards_of = {one.step: one.rewards_P for one in made}
    assert rewards_of[6] == share_right(texts, gold)
    others = [rewards_P for step, rewards_P in rewards_of.items() if step != 6]
    assert len(set(rewards_of[6])) > 1 and any(one != rewards_of[6] for one in others), "or it would say nothing"


def test_an_adapter_is_trained_and_vllm_gives_its_logprobs_after_every_push(server: Server, tmp_path: Path) -> None:
    lora = [
        "--learner.lora.rank",
        "4",
        "--learner.parity.every-steps",
        "1",
        "--learner.optimizer.learning-rate",
        "1e-2",
    ]
    Learner(server, tmp_path / "run", "--learner.steps", "6", *lora).finish()
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    parity = [line["parity/abs_logprob"] for line in metrics if "parity/abs_logprob" in line]
    assert parity and max(parity) <= 1e-4
    assert max(line["policy/behaviour_kl"] for line in metrics) > 1e-3  # between versions: the adapter has moved


def test_the_self_test_finds_only_rounding_noise_between_vllm_and_the_learner(server: Server) -> None:
    # Long completions, or a fast machine has none in flight when the push comes.
    sampling = ["--learner.sampling.temperature", "0.7", "--learner.sampling.max-tokens", "48"]
    done = run_learner("self-test", RECIPE, *server.shared, "--json", *sampling)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(done.stdout)["measured"]
    for tokens in (measured["fresh"], measured["through_push"]):
        assert tokens["num_tokens"] > 100 and tokens["abs_logprob_mean"] <= 1e-5 and tokens["clipped_frac"] == 0


def test_a_learner_killed_in_the_middle_resumes_and_loses_nothing(server: Server, tmp_path: Path) -> None:
    learner = Learner(server, tmp_path / "run", "--learner.steps", "12")
    learner.wait_for_step(5)
    learner.process.kill()
    learner.process.join()
    output = Learner(server, tmp_path / "run", "--learner.steps", "12", "--resume").finish()
    assert "resumed from" in output
    assert_every_group_is_accounted_for(tmp_path / "run", 12)


def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint_to_resume_from(server: Server, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    learner = Learner(server, run_dir, "--learner.steps", "500")
    learner.wait_for_step(2)
    assert learner.process.pid is not None
    os.kill(learner.process.pid, signal.SIGINT)
    assert "stopping after this step" in learner.finish()
    done = learner.steps_done()
    assert (run_dir / "checkpoints" / f"step-{done:06d}" / "state.json").exists()
    Learner(server, run_dir, "--learner.steps", str(done + 2), "--resume").finish()
    assert report_of(run_dir)["steps"] == done + 2


def test_colocate_runs_both_and_ends_both(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.cli", "colocate", RECIPE, "--run-dir", str(tmp_path / "run")]
    command += ["--endpoint", f"tcp://127.0.0.1:{free_port()}", "--server.http-port", str(free_port())]
    command += ["--learner.steps", "3", "--learner.report.dashboard-port", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "learner | Step 3/3" in done.stdout and " server | " in done.stdout
    assert report_of(tmp_path / "run")["groups_consumed"] == 48
    assert (tmp_path / "run" / "logs" / "server.log").read_text().count("ready after") == 1
