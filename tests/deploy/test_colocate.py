"""How colocate shares flags and cores between the two processes, and that it leaves none of them behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deploy.colocate import GRACE_S, _flags_of_each, _split_cores

ROOT = Path(__file__).parent.parent.parent


def test_private_flags_go_to_their_side_and_shared_ones_to_both() -> None:
    flags = ["--learner.steps", "3", "--seed", "1", "--server.cpu-cores", "0", "1", "--model", "m"]
    learner, server = _flags_of_each(flags)
    assert learner == ["--learner.steps", "3", "--seed", "1", "--model", "m"]
    assert server == ["--seed", "1", "--server.cpu-cores", "0", "1", "--model", "m"]


def test_cores_are_halved_unless_the_config_names_any() -> None:
    num_cores = len(os.sched_getaffinity(0))
    server, learner = _split_cores(None, None)
    if num_cores >= 2 and not Path("/dev/nvidia0").exists():
        assert server[0] == "--server.cpu-cores" and learner[0] == "--learner.cpu-cores"
        assert sorted(map(int, server[1:] + learner[1:])) == list(range(num_cores))
    assert _split_cores((0,), None) == ([], [])


@pytest.mark.vllm
@pytest.mark.timeout(500)
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_closed_terminal_and_a_killed_colocate_leave_no_process_behind(tmp_path: Path, number: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "deploy.colocate",
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
        colocate = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    deadline = time.monotonic() + 180  # the first import in a fresh environment, on a busy machine
    both_are_up = re.compile("waiting for the inference server|connected to the server")
    while not both_are_up.search((tmp_path / "out").read_text()):
        assert colocate.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()
        time.sleep(0.1)
    children = psutil.Process(colocate.pid).children(recursive=True)
    assert len(children) >= 2
    colocate.send_signal(number)
    colocate.wait(2 * 2 * GRACE_S + 60)  # each of the two may take it to end, and again for the last of its output
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
