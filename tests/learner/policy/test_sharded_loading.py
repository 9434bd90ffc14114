"""What a sharded policy is filled with, and how much memory that takes, against loading the whole policy."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from learner.policy.hf_weights import held
from learner.policy.lora import has_adapter
from learner.policy.model import load_policy
from learner.policy.sharded_loading import CheckpointReader, allocate, filled, make_reader, opened
from learner.policy.sharding import shard
from learner.policy.snapshot import whole
from learner.run_inputs import RunInputs
from learner.training.policy_trainer import make_trainer
from protocol.errors import ConfigError
from tests.bench.live_memory import LiveBytes
from tests.learner.ranks import on_four_ranks
from tests.learner.training.fixed_groups import a_run
from tests.sweep.families import tiny_config, tiny_model

FAMILIES = ["qwen2", "qwen3_moe", "gemma3_text", "gpt2", "deepseek_v3", "afmoe", "falcon_h1"]
"""Tied weights, joined experts, scaled embeddings, transposed weights, buffers that are part of a checkpoint,
parameters that become such buffers, and a buffer that the whole model makes."""


def tensors_of(policy: Any) -> dict[str, torch.Tensor]:
    tensors = {**dict(policy.named_parameters()), **dict(policy.named_buffers())}
    return {name: whole(tensor.detach()).clone() for name, tensor in tensors.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name].dtype != expected[name].dtype] == []
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_without_weights_is_filled_with_those_of_its_files(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    tiny_model(tiny_config(family)).save_pretrained(tmp_path)
    expected = tensors_of(load_policy(tmp_path, gradient_checkpointing=False, dtype=dtype))
    policy, skeleton = (
        load_policy(tmp_path, gradient_checkpointing=False, dtype=dtype, on_meta=True) for _ in range(2)
    )
    with opened(tmp_path) as slices, filled(policy, CheckpointReader(skeleton, slices)):
        assert_same(tensors_of(policy), expected)
    assert all(parameter.is_meta for parameter in policy.parameters())


def save_with_head(path: Path, *, is_other: bool) -> None:
    """Save a model whose config ties the head to the embeddings, with both in its file."""
    config = tiny_config("qwen2")
    config.tie_word_embeddings = True
    tiny_model(config).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (1 if is_other else 0)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def test_weights_that_the_config_ties_are_one_tensor_though_the_files_have_two(tmp_path: Path) -> None:
    save_with_head(tmp_path, is_other=False)
    expected = tensors_of(load_policy(tmp_path, gradient_checkpointing=False))
    policy: Any = load_policy(tmp_path, gradient_checkpointing=False, on_meta=True)
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    with opened(tmp_path) as slices, filled(policy, CheckpointReader(policy, slices)):
        assert_same(tensors_of(policy), expected)


def test_two_different_tensors_for_weights_that_the_config_ties_are_an_error(tmp_path: Path) -> None:
    save_with_head(tmp_path, is_other=True)
    load = partial(load_policy, tmp_path, gradient_checkpointing=False)
    message = "its config ties lm_head.weight to model.embed_tokens.weight, but its files have two different tensors"
    with pytest.raises(ConfigError, match=message):
        load()
    with opened(tmp_path) as slices, pytest.raises(ConfigError, match=message):
        make_reader(partial(load, on_meta=True), slices)


def load(accelerator: Accelerator, path: Path, learner: dict[str, Any]) -> dict[str, torch.Tensor]:
    run = msgspec.structs.replace(a_run(path, **learner), dtype="bfloat16")
    policy = make_trainer(RunInputs(run), accelerator, is_new=True).policy
    assert has_adapter(policy) == ("lora" in learner)
    return tensors_of(policy)


@pytest.mark.system
@pytest.mark.parametrize(
    ("family", "learner"),
    [
        ("qwen3_moe", {"sharding": "full"}),
        ("deepseek_v3", {"sharding": "hybrid"}),
        ("gpt2", {"sharding": "full", "lora": {"rank": 4}}),
    ],
)
def test_four_ranks_hold_what_one_loads(
    accelerator: Accelerator, tmp_path: Path, family: str, learner: dict[str, Any]
) -> None:
    tiny_model(tiny_config(family)).save_pretrained(tmp_path)
    expected = load(accelerator, tmp_path, learner)
    for found in on_four_ranks(load, tmp_path, learner):
        assert_same(found, expected)


def test_a_model_whose_tensors_transformers_needs_while_it_loads_them_is_not_loaded_in_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model(tiny_config("qwen4_exp")).save_pretrained(tmp_path)
    with opened(tmp_path) as slices:
        assert make_reader(partial(load_policy, tmp_path, gradient_checkpointing=False, on_meta=True), slices) is None
    assert "loading the whole policy on every rank before it is sharded: Cannot copy out of meta tensor" in caplog.text


@pytest.mark.system
def test_files_with_names_of_an_older_release_are_loaded_whole(accelerator: Accelerator, tmp_path: Path) -> None:
    tiny_model(tiny_config("qwen2")).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, file, {"format": "pt"})
    expected = load(accelerator, tmp_path, {})
    for found in on_four_ranks(load, tmp_path, {"sharding": "full"}):
        assert_same(found, expected)


def live_bytes(accelerator: Accelerator, path: Path) -> int:
    with LiveBytes() as live, opened(path) as slices:
        load_skeleton = partial(load_policy, path, gradient_checkpointing=False, on_meta=True)
        reader, policy = make_reader(load_skeleton, slices), load_skeleton()
        assert reader is not None
        shard(policy, (accelerator.num_processes,), "cpu", torch.float32)
        allocate(policy, accelerator.device)
        reader.fill(held(policy))
    return live.peak


@pytest.mark.system
def test_a_rank_never_holds_more_than_its_share_and_one_tensor(tmp_path: Path) -> None:
    config = tiny_config("qwen2")
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = 40, 64, 512
    config.layer_types = ["full_attention"] * 40
    model = tiny_model(config)
    model.save_pretrained(tmp_path)
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    for peak in on_four_ranks(live_bytes, tmp_path):
        assert sum(sizes) / 4 <= peak < sum(sizes) / 4 + max(sizes) + 0.1 * sum(sizes)
