"""Learner ranks under torchrun on two hosts: each with its own disk, and one directory that both mount."""

from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pytest
import torch

from learner.rollouts.ledger import Ledger
from learner.storage.checkpoint import complete_checkpoints, find_checkpoint
from learner.train import train
from protocol.channel.keys import make_keys
from protocol.config import to_toml
from tests.learner.checkpoints import weights_of
from tests.learner.model_engine import tiny_server
from tests.learner.runs import GROUPS_PER_STEP, make_run, seeded
from tests.two_hosts import TwoHosts, power_off, steps_of, wait_for, why_not
from tests.wire import DEVICE

pytestmark = [pytest.mark.system, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

PORT, MASTER_PORT = 5757, 29400
FOREVER = 100_000


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", DEVICE)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with TwoHosts(has_plain_link=True) as hosts:
        yield hosts


class Nodes:
    """Two torchruns, one on each host; `place` is a directory with a disk for each host."""

    def __init__(self, hosts: TwoHosts, place: Path) -> None:
        self._hosts, self._place = hosts, place
        self.shared, self.run_dir = place / "shared", place / "disk-0/run"
        self.agents: list[Popen[bytes]] = []
        self.logs = [place / f"node-{host}.log" for host in (0, 1)]
        for host in (0, 1):  # each mounts the shared directory at a place of its own
            (place / f"disk-{host}").mkdir()
            (place / f"disk-{host}/checkpoints").symlink_to(self.shared)
        self.shared.mkdir()

    def start(self, *flags: str) -> None:
        self.agents = []
        for host in (0, 1):
            disk = self._place / f"disk-{host}"
            rendezvous = ["--master-addr", self._hosts.addresses[0], "--master-port", str(MASTER_PORT)]
            self.agents.append(
                self._hosts.start(
                    host,
                    ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host), *rendezvous,
                     "--nproc-per-node", "1", "-m", "learner", "train", str(self._place / "run.toml"),
                     "--run-dir", str(disk / "run"), "--learner.checkpoint.dir", str(disk / "checkpoints"), *flags],
                    self.logs[host],
                )
            )  # fmt: skip

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        wait_for(is_so, *self.logs)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: len(self.steps()) >= step or any(agent.poll() for agent in self.agents))

    def steps(self) -> list[int]:
        return steps_of(self.run_dir)

    def ends(self) -> list[int]:
        self.wait_for(lambda: all(agent.poll() is not None for agent in self.agents))
        return [agent.returncode for agent in self.agents]

    @property
    def log(self) -> str:
        return "\n".join(log.read_text() for log in self.logs if log.exists())


@pytest.mark.timeout(600)
def test_a_run_over_two_hosts_survives_the_loss_of_one_and_is_resumed_sharded_to_the_end_of_an_unbroken_run(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys")
    endpoint = f"tcp://{hosts.addresses[0]}:{PORT}"
    server_log = tmp_path / "server.log"
    hosts.start(0, ["-m", "tests.learner.model_engine", endpoint, str(tmp_path / "keys")], server_log)
    settings = seeded() | {"checkpoint": {"every_steps": 2}}
    (tmp_path / "run.toml").write_text(to_toml(make_run(tmp_path, endpoint, **settings)))
    nodes, keys = Nodes(hosts, tmp_path), ("--keys", str(tmp_path / "keys"))

    nodes.start(*keys, "--learner.steps", str(FOREVER))
    nodes.wait_for(lambda: find_checkpoint(nodes.shared) is not None or any(one.poll() for one in nodes.agents))
    nodes.wait_for_step(3)
    power_off(nodes.agents[1])
    assert all(nodes.ends()), "the other node does not go on alone"
    assert "rank 1 of this learner" in nodes.log and "has died, so all its ranks stop" in nodes.log
    assert not (tmp_path / "disk-1/run").exists(), "a run directory is a matter of rank 0"

    end = len(nodes.steps()) + 3
    nodes.start(*keys, "--learner.steps", str(end), "--learner.sharding", "full", "--resume")
    assert nodes.ends() == [0, 0], nodes.log

    newest = complete_checkpoints(nodes.shared)[-1]
    assert (
        newest.name == f"step-{end:06d}" and "resumed from" in nodes.log and set(nodes.steps()) == {*range(1, end + 1)}
    )
    assert {path.name for path in (newest / "trained").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    counts = Ledger(nodes.run_dir / "ledger.db", read_only=True).counts()
    assert (counts.lost, counts.duplicated, counts.outstanding) == (0, 0, 0)
    assert counts.consumed == GROUPS_PER_STEP * end

    with tiny_server() as server:
        unbroken = make_run(tmp_path / "unbroken", server.endpoint, **settings | {"steps": end})
        train(unbroken, resume=False)
    expected = weights_of(complete_checkpoints(unbroken.checkpoint_dir)[-1])
    for name, weight in weights_of(newest).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-3, rtol=0)
