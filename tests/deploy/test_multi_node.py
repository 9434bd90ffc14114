"""Runs over several nodes: who serves and who trains, the manifests as kustomize builds them, the SkyPilot task."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from inference_server.config import ServerRun
from learner.config import LearnerRun
from protocol.endpoint import split_endpoint
from tests.deploy.commands import DEPLOY, ROOT, check, tool

SCHEMAS = Path(__file__).parent / "schemas"
SCRIPT, TASK = str(DEPLOY / "serve_or_train.sh"), DEPLOY / "skypilot/slipstream.yaml"
NODES = ["node0", "node1", "node2", "node3", "node4", "node5"]
PRINT = '#!/bin/bash\nprintf "%s\\n" "{name}" "$@"\n'


def roles(folder: Path, *flags: str, names: list[str] = NODES, **environment: str) -> list[list[str]]:
    """The command that each node runs."""
    for name in ("slipstream", "accelerate"):
        command = folder / name
        command.write_text(PRINT.replace("{name}", name))
        command.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "NODE_NAMES": " ".join(names), "KEYS": "/keys"}
    commands = []
    for index in range(len(names)):
        done = subprocess.run(
            ["bash", SCRIPT, "run.toml", str(folder / "run"), *flags],
            env=os.environ | path | {"NODE_INDEX": str(index)} | environment,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        commands.append(done.stdout.splitlines())
    return commands


def launched(words: list[str]) -> tuple[dict[str, str], LearnerRun]:
    """What accelerate makes of its flags for a rank's environment and torchrun, and the run of each rank."""
    assert words[:2] == ["accelerate", "launch"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
    environment = prepare_multi_gpu_env(arguments)
    of_torchrun = ("nnodes", "node_rank", "nproc_per_node", "rdzv_backend", "rdzv_endpoint")
    run = check([arguments.training_script, *arguments.training_script_args])
    assert isinstance(run, LearnerRun) and arguments.no_python
    return {name: str(getattr(arguments, name)) for name in of_torchrun} | environment, run


def test_the_first_nodes_serve_and_the_others_train_as_ranks_of_one_learner(tmp_path: Path) -> None:
    flags = ["--server.tensor-parallel-size", "16", "--seed", "5", "--learner.steps", "3"]
    split = {"SERVERS": "2", "NODES_PER_SERVER": "2", "RANKS": "8"}
    *serving, first, second = roles(tmp_path, *flags, **split)
    runs = [check(words) for words in serving]
    assert all(isinstance(run, ServerRun) and run.server.tensor_parallel_size == 16 for run in runs)
    assert [(run.server.node_rank, run.server.master_addr) for run in runs if isinstance(run, ServerRun)] == [
        (0, "node0"), (1, "node0"), (0, "node2"), (1, "node2")
    ]  # fmt: skip
    for rank, words in enumerate((first, second)):
        environment, run = launched(words)
        assert environment["nnodes"] == "2" and environment["node_rank"] == str(rank)
        assert environment["nproc_per_node"] == "8"
        assert (environment["rdzv_backend"], environment["rdzv_endpoint"]) == ("static", "node4:29400")
        assert run.servers == ("tcp://node0:5757", "tcp://node2:5757") and (run.seed, run.learner.steps) == (5, 3)
        assert run.evaluation_url == "http://node0:5758/v1" and "tensor_parallel_size" not in run.server


def test_two_nodes_are_a_server_and_a_learner_of_one_rank(tmp_path: Path) -> None:
    server, learner = roles(tmp_path, names=NODES[:2], PORT="6000")
    assert learner[:2] == ["slipstream", "train"]
    served, run = check(server), check(learner)
    assert isinstance(served, ServerRun) and isinstance(run, LearnerRun)
    assert served.endpoint == "tcp://*:6000" and run.servers == ("tcp://node0:6000",) and served.server.nnodes == 1


@cache
def built() -> dict[tuple[str, str], dict[str, Any]]:
    """The objects of the kustomization, by kind and name."""
    done = subprocess.run(
        [tool("kubectl"), "kustomize", str(DEPLOY / "kubernetes/multi-node")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}


def server_pods() -> dict[str, Any]:
    return built()["LeaderWorkerSet", "slipstream-server"]["spec"]["leaderWorkerTemplate"]


def learner_jobs() -> list[dict[str, Any]]:
    return built()["JobSet", "slipstream-learner"]["spec"]["replicatedJobs"]


def only_container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return only


def test_what_kustomize_builds_is_valid(tmp_path: Path) -> None:
    """Kubernetes' own objects, and its pods and jobs in the two others, against its schemas; those by their own."""
    objects = [one for one in built().values() if one["kind"] not in ("LeaderWorkerSet", "JobSet")]
    for kind, name in (("LeaderWorkerSet", "leaderworkerset"), ("JobSet", "jobset")):
        (one,) = (one for one in built().values() if one["kind"] == kind)
        schema = json.loads((SCHEMAS / f"{name}.json").read_text())
        jsonschema.validate(one, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(one | {"spec": one["spec"] | {"unknown": 1}}, schema)
    named = {"metadata": {"name": "of-a-template"}}
    objects += [{"apiVersion": "batch/v1", "kind": "Job", **named, **job["template"]} for job in learner_jobs()]
    for template in ("leaderTemplate", "workerTemplate"):
        objects.append({"apiVersion": "v1", "kind": "PodTemplate", **named, "template": server_pods()[template]})
    for claim in server_pods()["volumeClaimTemplates"]:
        objects.append({"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim})
    files = []
    for number, one in enumerate(objects):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(yaml.safe_dump(one))
    done = subprocess.run([tool("kubernetes-validate"), "--strict", *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pods_of_a_server_are_its_nodes_and_only_the_first_serves_http() -> None:
    size, addresses = server_pods()["size"], []
    for index, template in enumerate(("leaderTemplate", "workerTemplate")):
        pod = only_container(server_pods()[template])
        address = "slipstream-server-0.slipstream-server.default"
        by_lws = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(index), "LWS_LEADER_ADDRESS": address}
        words = [*pod["command"], *pod["args"]]
        for name, value in by_lws.items():
            words = [word.replace(f"$({name})", value) for word in words]
        run = check(words)
        assert isinstance(run, ServerRun) and run.server.nnodes == size and run.server.node_rank == index
        assert run.server.workers_per_node == pod["resources"]["limits"]["nvidia.com/gpu"]
        assert ("readinessProbe" in pod) == ("livenessProbe" in pod) == ("ports" in pod) == (index == 0)
        addresses.append(run.server.master_addr)
    assert set(addresses) == {address}
    selector = built()["Service", "slipstream-http"]["spec"]["selector"]
    assert selector["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert built()["Service", "slipstream-server"]["spec"]["publishNotReadyAddresses"] is True
    assert ("StatefulSet", "slipstream-server") not in built() and ("Job", "slipstream-learner") not in built()


def test_the_jobs_of_the_learner_are_nodes_of_one_run_and_share_its_checkpoints(tmp_path: Path) -> None:
    (host, _) = split_endpoint("tcp://slipstream-server-0.slipstream-server:5757")
    first, others = learner_jobs()
    num_nodes = first["replicas"] + others["replicas"]
    for job in (first, others):
        pod = job["template"]["spec"]["template"]
        container, volumes = only_container(pod), {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        environment = {variable["name"]: variable for variable in container["env"]}
        fixed = {name: str(variable["value"]) for name, variable in environment.items() if "value" in variable}
        assert (
            fixed["NODES"] == str(num_nodes)
            and fixed["MASTER_ADDR"] == "slipstream-learner-first-0-0.slipstream-learner"
        )
        assert fixed["RANKS"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
        rank = environment["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert rank == "metadata.labels['jobset.sigs.k8s.io/job-global-index']"
        run = check([*container["command"], *container["args"]])
        assert isinstance(run, LearnerRun) and split_endpoint(run.endpoint)[0] == host
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        shared = volumes[mounts[f"/{run.checkpoint_dir.parts[1]}"]]["persistentVolumeClaim"]["claimName"]
        assert built()["PersistentVolumeClaim", shared]["spec"]["accessModes"] == ["ReadWriteMany"]
        own = volumes[mounts[f"/{Path(run.run_dir).parts[1]}"]]
        assert ("persistentVolumeClaim" in own) == (job is first), "a disk of one node"
        config = volumes["config"]["configMap"]["name"]
        assert ("ConfigMap", config) in built()
    assert (
        built()["Service", "slipstream-dashboard"]["spec"]["selector"]["jobset.sigs.k8s.io/replicatedjob-name"]
        == "first"
    )
    policy = built()["NetworkPolicy", "slipstream-learner"]["spec"]
    peers = [peer["podSelector"]["matchLabels"] for peer in policy["ingress"][0]["from"]]
    assert policy["podSelector"]["matchLabels"] in peers and "ports" not in policy["ingress"][0]


LEARNER_WITH_NOTHING_TO_DO = """#!/bin/bash
echo "$NODE_INDEX started" >> log
[ "$NODE_INDEX" -eq 1 ] || exec sleep 1000
until (exec 3<> /dev/tcp/127.0.0.1/PORT) 2> /dev/null; do sleep 0.1; done
"""
IN_TENTHS = "sleep() { command sleep $(($1 / 10)).$(($1 % 10)); }\n"


def test_the_servers_of_skypilot_end_after_a_learner_that_ended_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    script = tmp_path / "deploy/serve_or_train.sh"
    script.parent.mkdir()
    script.write_text(LEARNER_WITH_NOTHING_TO_DO.replace("PORT", port))
    script.chmod(0o755)
    task = yaml.safe_load(TASK.read_text())
    run = IN_TENTHS + task["run"].replace("5759", port)
    environment = task["envs"] | {
        "VLLM_API_KEY": "",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        "HOME": str(tmp_path),
    }
    environment = {name: str(value) for name, value in environment.items()}
    nodes = [
        subprocess.Popen(["bash", "-c", run], cwd=tmp_path, env=os.environ | environment | {"SKYPILOT_NODE_RANK": rank})
        for rank in ("0", "1")
    ]
    assert [node.wait(60) for node in nodes] == [128 + signal.SIGTERM, 0]
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["0 started", "1 started"]


def connects(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=20):
        return True
    return False


def test_the_servers_of_skypilot_reach_a_learner_as_often_as_they_look() -> None:
    program = re.search(r'python3 -c ".*?"', yaml.safe_load(TASK.read_text())["run"], re.DOTALL)
    assert program is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(["bash", "-c", f"signal={port}; exec {program[0]}"]) as beacon:
        try:
            deadline = time.monotonic() + 30
            while not connects(port):
                assert time.monotonic() < deadline, "the port did not open"
                time.sleep(0.05)
            assert all(connects(port) for _ in range(200)), "the queue of the port is full"
        finally:
            beacon.kill()


def test_the_skypilot_task_runs_the_script_with_all_that_it_needs(tmp_path: Path) -> None:
    task = yaml.safe_load(TASK.read_text())
    checked = subprocess.run(["bash", "-n"], input=task["run"] + task["setup"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert (ROOT / task["envs"]["CONFIG"]).is_file() and "deploy/serve_or_train.sh" in task["run"]
    variables = {"SERVERS", "NODES_PER_SERVER", "RANKS"}
    assert variables <= task["envs"].keys()
    assert task["num_nodes"] > int(task["envs"]["SERVERS"]) * int(task["envs"]["NODES_PER_SERVER"])
    sky = pytest.importorskip("sky", reason="SkyPilot checks the task where it is installed: pip install skypilot")
    task = sky.Task.from_yaml(str(TASK))
    assert task.num_nodes == 2
