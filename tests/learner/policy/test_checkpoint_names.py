"""Pushed and exported tensors have the names, shapes and values of `save_pretrained`, one group at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from learner.config import LoraConfig
from learner.policy import hf_weights
from learner.policy.hf_weights import CheckpointNames, held
from learner.policy.lora import add_adapter
from learner.policy.model import load_policy
from learner.policy.published import PublishedPolicy
from tests.learner.policy.tiny_policy import merged_tensors, move
from tests.zoo.families import save_model

Tensors = dict[str, torch.Tensor]
DENSE = ["qwen2", "llama", "gpt_neox"]


def a_policy(family: str, path: Path) -> PreTrainedModel:
    save_model(family, path)
    policy = load_policy(path, gradient_checkpointing=False)
    move(policy, seed=1, scale=0.02)
    return policy


def saved(policy: PreTrainedModel, path: Path, **options: Any) -> Tensors:
    policy.save_pretrained(path, **options)
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(sent: list[tuple[str, torch.Tensor]], expected: Tensors) -> None:
    assert len(sent) == len(dict(sent)) and dict(sent).keys() == expected.keys()
    for name, tensor in sent:
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("family", [*DENSE, "qwen3_moe", "mixtral", "gpt_oss", "qwen3_5"])
def test_pushed_tensors_equal_those_of_save_pretrained_without_copies_of_dense_models(
    accelerator: Accelerator, tmp_path: Path, family: str
) -> None:
    policy = a_policy(family, tmp_path / "model")
    published = list(PublishedPolicy(accelerator, policy, torch.float32).tensors())
    assert_equal(published, saved(policy, tmp_path / "saved"))
    if family in DENSE:
        assert all(one is other for (_, one), other in zip(published, policy.parameters(), strict=True))


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_5"])
def test_an_adapter_is_merged_before_names_are_converted(accelerator: Accelerator, tmp_path: Path, family: str) -> None:
    policy = a_policy(family, tmp_path / "model")
    add_adapter(policy, LoraConfig(rank=4, target_modules=("q_proj", "o_proj")), seed=0)
    move(policy, seed=2)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    expected = saved(whole, tmp_path / "saved", state_dict=merged_tensors(policy))
    assert_equal(list(PublishedPolicy(accelerator, policy, torch.float32).tensors()), expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_5"])
def test_only_the_tensors_of_one_conversion_are_requested_together(tmp_path: Path, family: str) -> None:
    """Memory is bounded by the largest group, which is one tensor: one projection of all experts of a layer."""
    policy = a_policy(family, tmp_path / "model")
    tensors = held(policy)
    names, num_asked = CheckpointNames(policy, tensors), 0

    def asked() -> Any:
        nonlocal num_asked
        for num_asked, item in enumerate(tensors.items(), start=1):  # noqa: B007
            yield item

    asked_before_each = [num_asked for _ in names.convert(asked())]
    # Every requested tensor is yielded before the next is computed.
    assert set(asked_before_each) == set(range(1, len(tensors) + 1))


def test_dependent_tensors_are_converted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return an artificial conversion that joins both norms of a layer."""
    policy = a_policy("llama", tmp_path / "model")
    ends = ("input_layernorm.weight", "post_attention_layernorm.weight")

    def revert(_: PreTrainedModel, tensors: Tensors) -> Tensors:
        left = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
        for layer in {name.rpartition("layers.")[2][0] for name in tensors if name.endswith(ends)}:
            left[f"norms.{layer}"] = torch.cat([tensors[f"model.layers.{layer}.{end}"] for end in ends])
        return left

    monkeypatch.setattr(hf_weights, "revert_weight_conversion", revert)
    tensors = held(policy)
    sent = list(CheckpointNames(policy, tensors).convert(tensors.items()))
    assert_equal([(name, tensor.detach()) for name, tensor in sent], revert(policy, tensors))
    order = [name for name, _ in sent]
    assert order.index("norms.0") < order.index("model.layers.1.self_attn.q_proj.weight")
