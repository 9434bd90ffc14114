"""Biases that choose a token's experts are float32 on both sides, in a sync and in every export.

Rounded to bfloat16, they send many tokens to other experts: models in use have biases of 5 and more.
"""

from pathlib import Path

import msgspec
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoTokenizer

from learner.policy import model
from learner.policy.model import compute_in, load_policy
from learner.policy.published import PublishedPolicy
from learner.policy.snapshot import trainable
from learner.publishing.export import rebuilt, write_model
from learner.run_inputs import RunInputs
from learner.servers.weight_copy import WeightCopy
from learner.storage.checkpoint import load_checkpoint
from learner.training.policy_trainer import make_trainer
from protocol.model_files import resolve_model
from protocol.weights.buckets import NamedTensors, make_manifest
from tests.learner.checkpoints import weights_of
from tests.learner.publishing.finished_run import reduce_to_model, start, train
from tests.sweep.families import tiny_config, tiny_model

FAMILIES = ["deepseek_v3", "minimax_m2", "lfm2_moe", "afmoe", "ernie4_5_moe", "laguna"]
"""The last three have them as parameters, and only two of all ask transformers to load them in float32."""
BIASES = ("e_score_correction_bias", "expert_bias")


def save_model(family: str, path: Path) -> dict[str, torch.Tensor]:
    """Save a model whose biases bfloat16 cannot hold; return them by name in the checkpoint."""
    tiny = tiny_model(tiny_config(family))
    for name, tensor in tiny.state_dict().items():
        if name.endswith(BIASES):
            tensor.copy_(5 + torch.rand(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
    tiny.save_pretrained(path)
    AutoTokenizer.from_pretrained(resolve_model("tiny:digits")).save_pretrained(path)
    return biases_of(load_file(path / "model.safetensors").items())


def biases_of(tensors: NamedTensors) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors if name.endswith(BIASES)}


def assert_exact(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) > 1
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected[name]), name
        assert not torch.equal(tensor, tensor.bfloat16().float())


@pytest.mark.parametrize("loaded_in", [torch.float32, torch.bfloat16], ids=["all", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_and_syncs_in_bfloat16_have_router_biases_in_float32(
    accelerator: Accelerator, tmp_path: Path, family: str, loaded_in: torch.dtype
) -> None:
    expected = save_model(family, tmp_path)
    policy = load_policy(tmp_path, gradient_checkpointing=False, dtype=loaded_in)
    compute_in(torch.bfloat16, policy)
    policy(torch.arange(3, 15)[None], use_cache=False)
    assert sum(name.endswith(BIASES) for name, _ in policy.named_buffers()) == len(expected)
    published = PublishedPolicy(accelerator, policy, torch.bfloat16)
    manifest = make_manifest(published.tensors(), published.wire_dtype, 1 << 20)
    assert {spec.name for spec in manifest.tensors if spec.dtype != "bfloat16"} == expected.keys()
    copy = WeightCopy(published.wire_dtype, published.copy_device)
    copy.update(published.tensors())
    assert_exact(biases_of(copy.tensors()), expected)


def test_a_checkpoint_that_has_router_biases_as_parameters_is_resumed_and_rebuilt(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions trained them as transformers loads them, without a gradient."""
    expected = save_model("afmoe", tmp_path / "base")
    run = start(tmp_path, kl={"coef": 0.1}, reference={"kind": "ema", "alpha": 0.5, "every_steps": 1})
    run = msgspec.structs.replace(run, model=str(tmp_path / "base"))
    with monkeypatch.context() as earlier:
        earlier.setattr(model, "_make_buffers_of_router_biases", lambda _: None)
        train(run, accelerator, 1)
    checkpoint = run.checkpoint_dir / "step-000001"
    stored = weights_of(checkpoint)
    assert len(biases_of(stored.items())) == len(expected)
    resumed = make_trainer(RunInputs(run), accelerator, is_new=False)
    load_checkpoint(resumed, checkpoint)
    for name, parameter in trainable(resumed.policy).items():
        assert torch.equal(parameter, stored.pop(name)), name
    assert stored.keys() == biases_of(stored.items()).keys()
    assert_exact(biases_of(rebuilt(run, checkpoint, "float32").model.items()), expected)


@pytest.mark.parametrize("run_dtype", ["float32", "bfloat16"])
def test_an_export_in_bfloat16_has_router_biases_in_float32(
    accelerator: Accelerator, tmp_path: Path, run_dtype: str
) -> None:
    expected = save_model(FAMILIES[0], tmp_path / "base")
    run = msgspec.structs.replace(start(tmp_path, dtype=run_dtype), model=str(tmp_path / "base"))
    train(run, accelerator, 1, 2)
    reduce_to_model(run, 1, 0.9)
    write_model(run, run.checkpoint_dir / "step-000001", "bfloat16", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert_exact(biases_of(tensors.items()), expected)
    assert {one.dtype for name, one in tensors.items() if name not in expected} == {torch.bfloat16}
