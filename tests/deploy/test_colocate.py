"""How colocate shares flags and cores between the two processes, and that it leaves none of them behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import msgspec
import psutil
import pytest

from deploy import colocate
from deploy.colocate import evaluation_flags, flags_by_section, with_cores
from deploy.placement import DeployConfig
from deploy.supervisor import GRACE_S
from protocol.errors import ConfigError
from protocol.hardware import has_gpu
from tests.deploy.test_placement import a_learner, a_server
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
NUM_STEPS = 200


def test_private_flags_go_to_their_side_and_shared_ones_to_all() -> None:
    flags = ["--learner.steps", "3", "--seed", "1", "--server.cpu-cores", "0", "1", "--model", "m"]
    flags += ["--deploy.restart", "on-failure"]
    assert flags_by_section(flags) == {
        "learner": ["--learner.steps", "3", "--seed", "1", "--model", "m"],
        "server": ["--seed", "1", "--server.cpu-cores", "0", "1", "--model", "m"],
        "deploy": ["--seed", "1", "--model", "m", "--deploy.restart", "on-failure"],
    }


def test_cores_are_halved_unless_the_config_names_any() -> None:
    num_cores = len(os.sched_getaffinity(0))
    config = with_cores(DeployConfig(), a_server(), a_learner())
    if num_cores >= 2 and not has_gpu():
        assert sorted([*config.server_cores[0], *config.learner_cores[0]]) == list(range(num_cores))
    assert with_cores(DeployConfig(), a_server(cpu_cores=[0]), a_learner()) == DeployConfig()
    named = DeployConfig(learner_cores=((0,),))
    assert with_cores(named, a_server(), a_learner()) == named


def test_a_learner_that_evaluates_gets_the_port_that_a_flag_gave_the_server() -> None:
    evaluating = a_learner(evaluation={"every_steps": 2})
    assert evaluation_flags(a_learner(), a_server(http_port=9000)) == ()
    assert evaluation_flags(evaluating, a_server(http_port=9000)) == (
        "--learner.evaluation.url",
        "http://127.0.0.1:9000/v1",
    )
    assert (
        evaluation_flags(a_learner(evaluation={"every_steps": 2, "url": "http://a/v1"}), a_server(http_port=9000)) == ()
    )
    with pytest.raises(
        ConfigError, match=r"with server.http_port = 0: an evaluation sends its requests to the server over HTTP"
    ):
        evaluation_flags(evaluating, a_server(http_port=0))


def test_several_ranks_know_each_other_and_only_a_learner_that_was_started_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(colocate, "SupervisedProcess", lambda *arguments: started.append(arguments))
    config = DeployConfig(learner_cores=((0,), (1,)))
    run = msgspec.structs.replace(a_learner(), run_dir=str(tmp_path))
    node = colocate.Node(
        config=config, learner_run=run, logs=tmp_path, server=("server",), learner=("learner",), resume=False
    )
    node.start_learner(again=False)
    node.start_learner(again=True)
    (tmp_path / "config.toml").touch()
    node.start_learner(again=True)
    commands = [command for _, command, _, _ in started]
    assert commands[0] == ("learner", "--learner.cpu-cores", "0")
    assert [("--resume" in command) for command in commands] == [False] * 4 + [True] * 2
    ports = [environment["MASTER_PORT"] for _, _, environment, _ in started]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    assert [name for name, *_ in started[:2]] == ["learner0", "learner1"]
    assert started[0][3] == tmp_path / "learner0.log"


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_servers_and_two_ranks_of_which_one_each_is_killed_end_complete(tmp_path: Path) -> None:
    ports, run_dir = [free_port(), free_port()], tmp_path / "run"
    recipe = tomllib.loads((ROOT / "deploy/recipes/reverse.toml").read_text())
    recipe |= {"run_dir": str(run_dir), "endpoints": [f"tcp://127.0.0.1:{port}" for port in ports]}
    recipe["server"] |= {"http_port": 0}
    report, checkpoint = {"trackers": [], "dashboard_port": 0}, {"every_steps": 20}
    recipe["learner"] |= {"steps": NUM_STEPS, "checkpoint": checkpoint, "report": report}
    recipe["deploy"] = {"server_cores": [[0], [1]], "learner_cores": [[2], [3]], "restart": "on-failure"}
    config, out, metrics = tmp_path / "run.toml", tmp_path / "out", run_dir / "metrics.jsonl"
    config.write_bytes(msgspec.toml.encode(recipe))
    with out.open("w") as file:
        command = [sys.executable, "-m", "deploy.cli", "colocate", str(config)]
        node = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)

    def steps() -> list[int]:
        return [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.exists() else []

    def strike_after(step: int, *marks: str) -> int:
        while step not in steps():
            assert node.poll() is None, out.read_text()
            time.sleep(0.1)
        struck = next(
            child
            for child in psutil.Process(node.pid).children()
            if set(marks) <= {*child.cmdline(), f"RANK={child.environ().get('RANK')}"}
        )
        struck.kill()
        return struck.pid

    rank = strike_after(30, "train", "RANK=1")
    strike_after(60, "inference_server", f"tcp://127.0.0.1:{ports[1]}")
    assert node.wait(400) == 0, out.read_text()
    text = out.read_text()
    assert text.count("rank 1 of 2") == 2 and f"rank 1 of this learner (process {rank} on" in text
    assert "learner1 exited with code -9; restarting it (1 of 3 within an hour)" in text
    assert "server1 exited with code -9; restarting it (1 of 3 within an hour)" in text
    assert set(steps()) == set(range(1, NUM_STEPS + 1)) and steps()[-1] == NUM_STEPS


@pytest.mark.system
@pytest.mark.timeout(500)
@pytest.mark.parametrize("number", [pytest.param(signal.SIGHUP, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_closed_terminal_and_a_killed_colocate_leave_no_process_behind(tmp_path: Path, number: int) -> None:
    ports = [free_port(), free_port()]
    command = [
        sys.executable,
        "-m",
        "deploy.cli",
        "colocate",
        "deploy/recipes/reverse.toml",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    command += [
        "--endpoint",
        f"tcp://127.0.0.1:{ports[0]}",
        "--server.http-port",
        str(ports[1]),
        "--learner.report.dashboard-port",
        "0",
    ]
    with (tmp_path / "out").open("w") as out:
        node = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    deadline = time.monotonic() + 180  # the first import in a fresh environment, on a busy machine
    both_are_up = re.compile("waiting for the inference server|connected to the server")
    while not both_are_up.search((tmp_path / "out").read_text()):
        assert node.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()
        time.sleep(0.1)
    children = psutil.Process(node.pid).children(recursive=True)
    assert len(children) >= 2
    node.send_signal(number)
    node.wait(2 * 2 * GRACE_S + 60)  # each of the two may take it to end, and again for the last of its output
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
