"""A run on three real Ray nodes on this machine: a node is killed, all ranks resume, then Ctrl-C. No prompt is lost."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from learner.config import LearnerRun
from protocol.config import DEFAULT_ENDPOINT, to_toml
from tests.chaos.audit import audit_prompts
from tests.learner.runs import GROUPS_PER_STEP, make_run
from tests.waiting import until

pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
pytestmark = pytest.mark.system

ROOT = Path(__file__).parent.parent.parent
NUM_CPUS = ("1", "3", "3")
"""Of the head and of two nodes: either may die, and the rest still has room for two servers and two ranks."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # which kills processes if others fill this machine's memory
}
TIMEOUT_S = 240.0
NUM_PROMPTS = 8
BUNDLES = [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 2.0}]
PLACE = f"""
import ray
from deploy import ray_cluster
from protocol.errors import DeadlineExceeded
bundles = {BUNDLES}
bundles[0]["node:" + ray_cluster.connect()] = 0.001
for host in ray.get([agent.host.remote() for agent in ray_cluster.start_agents(bundles, 60.0)]):
    print(host.node, ",".join(host.gpus))
try:
    ray_cluster.start_agents([{{"CPU": 100.0}}], 1.0)
except DeadlineExceeded as error:
    print(error)
"""
ON_RAY = {"restart": "on-failure", "ray": {"servers": 2, "ranks": 2, "use_gpus": False}}


class Nodes:
    """A cluster, of which a node can be killed."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.deploy.ray_nodes", *NUM_CPUS]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def kill(self, node: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{node}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "killed\n"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    cluster = Nodes()
    yield cluster
    cluster.process.communicate(timeout=TIMEOUT_S)


def start(nodes: Nodes, config: Path, output: Path, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.deploy.ray_driver", str(config), *flags]
    with output.open("ab") as file:
        environment = os.environ | ENVIRONMENT | {"RAY_ADDRESS": nodes.address}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)


def end_of(output: Path) -> str:
    return output.read_text()[-8000:]


def step_of(run: LearnerRun) -> int:
    """Return the last step that has been written whole."""
    *whole, _ = (Path(run.run_dir) / "metrics.jsonl").read_text().split("\n")
    return int(json.loads(whole[-1])["step"])


def num_processes(module: str, config: Path) -> int:
    """Return how many processes run a module with this config, on all nodes."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return sum(module in command and str(config) in command for command in commands)


def test_ray_gives_each_bundle_gpus_of_one_node_and_an_error_names_what_has_no_room(nodes: Nodes) -> None:
    environment = os.environ | ENVIRONMENT | {"RAY_ADDRESS": nodes.address}
    done = subprocess.run(
        [sys.executable, "-c", PLACE], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    *hosts, error = done.stdout.splitlines()
    found = [(node, gpus.split(",")) for node, gpus in map(str.split, hosts)]
    assert [len(gpus) for _, gpus in found] == [1, 1, 2]
    given = [(node, gpu) for node, gpus in found for gpu in gpus]
    assert len(set(given)) == 4 and {gpu for _, gpu in given} <= {"0", "1"}
    assert re.fullmatch(
        r"the cluster has no room for the bundles \[{'CPU': 100.0}\] after 1 s \(free: {.*'GPU': .*}\); add nodes, or "
        r"raise deploy.ray.start_timeout_s", error,
    )  # fmt: skip


@pytest.mark.timeout(900)
def test_a_lost_node_and_ctrl_c_lose_no_prompt(tmp_path: Path, nodes: Nodes) -> None:
    config, output = tmp_path / "run.toml", tmp_path / "driver.log"
    run = make_run(tmp_path, steps=1000, checkpoint={"every_steps": 3, "export_model": False}, connect_timeout_s=200)
    run = msgspec.structs.replace(run, endpoint=DEFAULT_ENDPOINT, endpoints=(), deploy=ON_RAY)
    config.write_text(to_toml(run))
    driver = start(nodes, config, output)

    def told(pattern: str, count: int = 1) -> list[str]:
        until(
            lambda: len(re.findall(pattern, output.read_text())) >= count or driver.poll() is not None,
            f"{pattern}\n{end_of(output)}", TIMEOUT_S,
        )  # fmt: skip
        found = re.findall(pattern, output.read_text())
        assert len(found) >= count, end_of(output)
        return found

    try:
        (node,) = told(r"learner0 \| on node \S+ \((\w+)\)")
        told(r"\| Step +4/1000")
        num_ready = len(told(r"syncing → ready"))
        nodes.kill(node)
        struck_at = step_of(run)
        told(r"restarting it \(1 of 3 within an hour\)")
        told(r"syncing → ready", num_ready + 2)
        until(lambda: step_of(run) >= struck_at + 4, end_of(output), TIMEOUT_S)
        assert num_processes("learner", config) == 2 == num_processes("tests.deploy.tiny_server", config)
        driver.send_signal(signal.SIGINT)
        assert driver.wait(TIMEOUT_S) == 0, end_of(output)
    finally:
        driver.kill()
        driver.wait(TIMEOUT_S)
    last = step_of(run)
    assert (Path(run.run_dir) / "checkpoints" / f"step-{last:06}").is_dir(), "of Ctrl-C"
    found = audit_prompts(
        Path(run.run_dir) / "ledger.db", num_steps=last, groups_per_step=GROUPS_PER_STEP, num_prompts=NUM_PROMPTS,
        seed=run.seed,
    )  # fmt: skip
    assert (found.lost, found.duplicated, found.consumed_once) == ([], [], found.expected)
    assert re.search(r"^Step +4/1000", (Path(run.run_dir) / "logs" / "learner0.log").read_text(), re.MULTILINE)
