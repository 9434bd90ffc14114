"""Server and learner on two hosts, keys in use, while the link between them is cut, slow or loses packets."""

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from learner.rollouts.ledger import Ledger
from protocol.channel.keys import make_keys
from tests.two_hosts import TwoHosts, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

RECIPE = "deploy/recipes/reverse.toml"
REAL = ["-m", "inference_server", RECIPE, "--server.http-port", "0"]
PORT = 5757
PUSH_PORT = 29500
PUBLIC = "10.78.0.2"
GROUPS_PER_STEP = 4
TIMEOUT_S = 120.0
SMALL = [
    "--learner.groups-per-step", str(GROUPS_PER_STEP), "--learner.sampling.group-size", "4",
    "--learner.sampling.max-tokens", "5", "--learner.data.num-digits", "4", "--learner.data.num-prompts", "16",
    "--learner.report.dashboard-port", "0", "--learner.report.trackers", "--learner.cpu-cores", "None",
]  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as hosts:
        yield hosts


class Run:
    """A learner on host 1 with its server on host 0."""

    def __init__(
        self,
        hosts: TwoHosts,
        directory: Path,
        num_steps: int,
        server: list[str] | None = None,
        learner: Sequence[str] = SMALL,
        groups_per_step: int = GROUPS_PER_STEP,
    ) -> None:
        self.hosts, self.num_steps, self.groups_per_step = hosts, num_steps, groups_per_step
        self.directory, self.log = directory / "run", directory / "learner.log"
        keys, endpoint = directory / "keys", f"tcp://{hosts.addresses[0]}:{PORT}"
        make_keys(keys)
        shared = ["--endpoint", endpoint, "--keys", str(keys)]
        command = [*server, *shared] if server is not None else ["-m", "tests.model_server", endpoint, str(keys)]
        self.server_log = directory / "server.log"
        self.server = hosts.start(0, command, self.server_log)
        command = ["-m", "learner", "train", RECIPE, *shared, "--run-dir", str(self.directory), *learner]
        self.learner = hosts.start(1, [*command, "--learner.steps", str(num_steps)], self.log)

    @property
    def steps_done(self) -> int:
        metrics = self.directory / "metrics.jsonl"
        return metrics.read_text().count("\n") if metrics.exists() else 0

    def wait_for(self, done: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            assert self.learner.poll() is None and time.monotonic() < deadline, self.logs
            time.sleep(0.05)

    def assert_ends_complete(self, timeout_s: float = TIMEOUT_S) -> None:
        """Every step is made of its groups, each of them consumed once."""
        try:
            assert self.learner.wait(timeout_s) == 0, self.logs
        except subprocess.TimeoutExpired:
            pytest.fail(self.logs)
        counts = Ledger(self.directory / "ledger.db", read_only=True).counts()
        assert (counts.lost, counts.duplicated, counts.outstanding) == (0, 0, 0)
        assert counts.consumed == self.groups_per_step * self.num_steps and self.steps_done == self.num_steps
        assert self.server.poll() is None, self.logs

    @property
    def logs(self) -> str:
        return f"learner:\n{self.log.read_text()}\nserver:\n{self.server_log.read_text()}"


def cut(run: Run, seconds: float) -> None:
    """Cut the link in the middle of the run, and see it waited out."""
    run.wait_for(lambda: run.steps_done >= 3)
    run.hosts.wire(cut=True)
    time.sleep(seconds)
    steps_done = run.steps_done
    assert steps_done < run.num_steps, "or nothing was cut"
    run.hosts.wire(cut=False)
    run.wait_for(lambda: run.steps_done > steps_done)
    run.assert_ends_complete()
    assert "lost the server at" in run.log.read_text()


@pytest.mark.slow
def test_a_run_outlasts_a_link_that_is_cut_for_seconds(hosts: TwoHosts, tmp_path: Path) -> None:
    cut(Run(hosts, tmp_path, num_steps=8), 5)


def run_behind_translation(
    hosts: TwoHosts, tmp_path: Path, num_steps: int, server: list[str] | None = None, **of_run: Any
) -> Run:
    """Two ports pass, and what is called at the learner's own address is not: what it advertises is another's."""
    hosts.wire(only_ports=[PORT, PUSH_PORT])
    hosts.translate(1, PUBLIC, PUSH_PORT)
    over_tcp = ["--learner.weight-sync.transport", "tcp", "--learner.weight-sync.ports", str(PUSH_PORT)]
    of_run["learner"] = [*of_run.get("learner", SMALL), *over_tcp, "--learner.weight-sync.advertise", PUBLIC]
    run = Run(hosts, tmp_path, num_steps, server, **of_run)
    run.assert_ends_complete(timeout_s=900)
    assert (run.directory / "metrics.jsonl").read_text().count("weight_sync/bytes") == num_steps
    return run


def test_a_run_is_complete_over_two_ports_at_an_address_that_is_advertised(hosts: TwoHosts, tmp_path: Path) -> None:
    run_behind_translation(hosts, tmp_path, num_steps=4)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(600)
def test_real_vllm_is_trained_over_two_ports_at_an_address_that_is_advertised(hosts: TwoHosts, tmp_path: Path) -> None:
    run_behind_translation(hosts, tmp_path, 30, REAL)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(1200)
def test_the_whole_demo_learns_between_two_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    whole = ["--learner.report.dashboard-port", "0"]
    run = run_behind_translation(hosts, tmp_path, 300, REAL, learner=whole, groups_per_step=16)
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    exact = [line["reward/exact_match"] for line in lines]
    assert sum(exact[:30]) / 30 < 0.1 and sum(exact[-30:]) / 30 >= 0.95


def test_a_worker_gives_up_a_transfer_whose_learner_has_vanished(hosts: TwoHosts, tmp_path: Path) -> None:
    """Long before the deadline of the push, which is a minute: no packet tells that a host is gone."""
    store_log, worker_log = tmp_path / "store.log", tmp_path / "worker.log"

    def wait_for(log: Path, text: str, timeout_s: float) -> None:
        give_up_at = time.monotonic() + timeout_s
        while text not in log.read_text():
            assert time.monotonic() < give_up_at, log.read_text()
            time.sleep(0.05)

    hosts.start(1, ["-m", "tests.watching", "store", hosts.addresses[1]], store_log)
    wait_for(store_log, "\n", TIMEOUT_S)
    port = store_log.read_text().strip()
    hosts.start(0, ["-m", "tests.watching", "worker", hosts.addresses[1], port], worker_log)
    wait_for(worker_log, "watching", TIMEOUT_S)
    time.sleep(2.0)  # so that it has a connection
    hosts.wire(cut=True)
    wait_for(worker_log, "its host is unreachable ([Errno 110] Connection timed out); the transfer failed", 30.0)


@pytest.mark.slow
@pytest.mark.system
def test_real_vllm_outlasts_a_link_that_is_cut_for_seconds(hosts: TwoHosts, tmp_path: Path) -> None:
    cut(Run(hosts, tmp_path, num_steps=8, server=REAL), 5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [60, 300])
def test_a_run_outlasts_a_link_that_is_cut_for_minutes(hosts: TwoHosts, tmp_path: Path, seconds: float) -> None:
    cut(Run(hosts, tmp_path, num_steps=8), seconds)


@pytest.mark.slow
def test_a_run_is_complete_over_a_link_that_is_slow_and_loses_packets(hosts: TwoHosts, tmp_path: Path) -> None:
    hosts.wire(delay_s=0.1, loss=0.01)
    run = Run(hosts, tmp_path, num_steps=10)
    run.assert_ends_complete(timeout_s=240)
    assert hosts.wire()["lost"] > 0


@pytest.mark.slow
def test_a_run_is_complete_over_a_link_that_breaks_again_and_again(hosts: TwoHosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, num_steps=200)
    run.wait_for(lambda: run.steps_done >= 1)
    chance = random.Random(0)
    for _ in range(10):
        hosts.wire(cut=True)
        time.sleep(chance.uniform(0.1, 6))
        hosts.wire(cut=False)
        steps_done = run.steps_done
        run.wait_for(lambda steps_done=steps_done: run.steps_done > steps_done)  # type: ignore[misc]
        time.sleep(chance.uniform(0, 0.3))  # so that the next cut comes anywhere in a step or a push
    run.assert_ends_complete()
