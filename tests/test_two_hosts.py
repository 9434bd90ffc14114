"""Server and learner on two hosts, with keys, while their link is firewalled, translated, slow, lossy or cut."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.rollouts.ledger import Ledger
from protocol.channel.keys import make_keys
from tests.two_hosts import TIMEOUT_S, TwoHosts, steps_of, wait_for, why_not

pytestmark = [pytest.mark.system, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

RECIPE = "deploy/recipes/reverse.toml"
PORT, PUSH_PORT = 5757, 29500
PUBLIC = "10.78.0.2"
NUM_STEPS, GROUPS_PER_STEP = 12, 4
SMALL = [
    "--learner.steps", str(NUM_STEPS), "--learner.groups-per-step", str(GROUPS_PER_STEP),
    "--learner.sampling.group-size", "4", "--learner.data.num-prompts", "16", "--learner.report.dashboard-port", "0",
]  # fmt: skip


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    with TwoHosts() as hosts:
        yield hosts


@pytest.mark.timeout(600)
def test_a_run_trains_at_an_advertised_address_over_two_ports_of_a_slow_link_that_is_cut(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    """The learner's own address is unreachable from the server; only the advertised address works."""
    make_keys(tmp_path / "keys")
    shared = ["--endpoint", f"tcp://{hosts.addresses[0]}:{PORT}", "--keys", str(tmp_path / "keys")]
    hosts.wire(only_ports=[PORT, PUSH_PORT], delay_s=0.02, loss=0.01)
    hosts.translate(1, PUBLIC, PUSH_PORT)
    logs = tmp_path / "server.log", tmp_path / "learner.log"
    server = hosts.start(0, ["-m", "inference_server", RECIPE, "--server.http-port", "0", *shared], logs[0])
    run_dir = tmp_path / "run"
    over_tcp = ["--learner.weight-sync.transport", "tcp", "--learner.weight-sync.ports", str(PUSH_PORT)]
    command = ["-m", "learner", "train", RECIPE, *shared, "--run-dir", str(run_dir), *SMALL, *over_tcp]
    learner = hosts.start(1, [*command, "--learner.weight-sync.advertise", PUBLIC], logs[1])

    wait_for(lambda: len(steps_of(run_dir)) >= 3, *logs)
    hosts.wire(cut=True)
    wait_for(lambda: "lost the server at" in logs[1].read_text(), *logs)
    assert len(steps_of(run_dir)) < NUM_STEPS, "the run ended before the cut"
    hosts.wire(cut=False)
    try:
        assert learner.wait(TIMEOUT_S) == 0, logs[1].read_text()
    except subprocess.TimeoutExpired:
        pytest.fail("\n".join(log.read_text() for log in logs))
    counts = Ledger(run_dir / "ledger.db", read_only=True).counts()
    assert (counts.lost, counts.duplicated, counts.outstanding) == (0, 0, 0)
    assert counts.consumed == GROUPS_PER_STEP * NUM_STEPS and len(steps_of(run_dir)) == NUM_STEPS
    assert (run_dir / "metrics.jsonl").read_text().count("weight_sync/bytes") == NUM_STEPS
    assert server.poll() is None and hosts.wire()["lost"] > 0


def test_a_worker_gives_up_a_transfer_when_the_learner_host_vanishes(hosts: TwoHosts, tmp_path: Path) -> None:
    """The worker gives up long before the push's deadline, although no packet reports the loss of the host."""
    store_log, worker_log = tmp_path / "store.log", tmp_path / "worker.log"
    hosts.start(1, ["-m", "tests.watching", "store", hosts.addresses[1]], store_log)
    wait_for(lambda: "\n" in store_log.read_text(), store_log)
    port = store_log.read_text().strip()
    hosts.start(0, ["-m", "tests.watching", "worker", hosts.addresses[1], port], worker_log)
    wait_for(lambda: "watching" in worker_log.read_text(), worker_log)
    time.sleep(2.0)  # until the worker has a connection
    hosts.wire(cut=True)
    reason = "its host is unreachable ([Errno 110] Connection timed out); the transfer failed"
    wait_for(lambda: reason in worker_log.read_text(), worker_log)
