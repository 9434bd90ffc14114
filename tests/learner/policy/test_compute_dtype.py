"""A policy in float32 that computes in bfloat16 is one that was loaded in bfloat16, with gradients in float32."""

import copy

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from learner.config import LoraConfig
from learner.policy.lora import add_adapter
from learner.policy.model import compute_dtype, compute_in
from learner.policy.snapshot import trainable
from tests.sweep.families import tiny_config, tiny_model
from tests.zoo.families import make_model

ROWS = torch.randint(1, 16, (3, 20), generator=torch.Generator().manual_seed(0))


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    """With their gradients."""
    model.zero_grad()
    logits = model(ROWS, use_cache=False).logits
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    return logits.detach()


def loaded_in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """`bfloat16` takes the buffers along, which a load leaves as they are."""
    loaded = copy.deepcopy(model).bfloat16()
    for module, original in zip(loaded.modules(), model.modules(), strict=True):
        module._buffers = copy.deepcopy(original._buffers)
    return loaded


def computing_in_bfloat16(model: PreTrainedModel, *, gradient_checkpointing: bool = False) -> PreTrainedModel:
    policy = copy.deepcopy(model)
    if gradient_checkpointing:
        policy.gradient_checkpointing_enable()
    compute_in(torch.bfloat16, policy)
    return policy


def assert_alike(policy: PreTrainedModel, expected: PreTrainedModel) -> None:
    assert torch.equal(logits_of(policy), logits_of(expected))
    tied = policy.get_input_embeddings().weight is policy.get_output_embeddings().weight
    for name, parameter in trainable(policy).items():
        theirs = expected.get_parameter(name).grad
        if theirs is None:
            assert parameter.grad is None
            continue
        assert isinstance(parameter, nn.Parameter) and parameter.dtype == parameter.grad.dtype == torch.float32
        # The gradients of a tied weight are summed in float32 here, in bfloat16 there.
        rounding = 2**-7 if tied and parameter is policy.get_input_embeddings().weight else 0
        torch.testing.assert_close(parameter.grad, theirs.float(), atol=rounding, rtol=rounding, msg=name)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "mixtral", "gpt_oss"])
def test_logits_and_gradients_are_those_of_a_model_in_bfloat16(family: str, gradient_checkpointing: bool) -> None:
    model = make_model(family).train()
    policy = computing_in_bfloat16(model, gradient_checkpointing=gradient_checkpointing)
    assert_alike(policy, loaded_in_bfloat16(model))


def test_a_model_that_casts_what_comes_to_its_head_computes_too() -> None:
    model = tiny_model(tiny_config("mamba"))
    policy_BSV, expected_BSV = logits_of(computing_in_bfloat16(model)), logits_of(loaded_in_bfloat16(model))
    torch.testing.assert_close(policy_BSV.float(), expected_BSV.float(), atol=0.05, rtol=0.05)


def test_an_adapter_over_frozen_weights_too() -> None:
    model = make_model("qwen2").bfloat16().train()
    add_adapter(model, LoraConfig(rank=4), seed=0)
    for name, parameter in trainable(model).items():
        if "lora_B" in name:  # which begins at 0, where A has no gradient
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    policy = computing_in_bfloat16(model, gradient_checkpointing=True)
    assert_alike(policy, loaded_in_bfloat16(model))
    assert all(parameter.grad.count_nonzero() for parameter in trainable(policy).values())


def test_a_pass_that_breaks_off_leaves_the_parameters_as_they_were() -> None:
    policy = computing_in_bfloat16(make_model("qwen2"))
    before = dict(policy.named_parameters())

    def fail(*_: object) -> None:
        raise MemoryError("in the middle of a layer")

    failing = policy.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        logits_of(policy)
    failing.remove()
    after = dict(policy.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is parameter for name, parameter in before.items())
    logits_of(policy)


def test_the_dtype_is_reported_and_in_float32_nothing_is_done() -> None:
    policy = make_model("qwen2")
    compute_in(torch.float32, policy)
    assert compute_dtype(policy) == torch.float32
    assert not any(module._forward_pre_hooks for module in policy.modules())
    assert compute_dtype(make_model("qwen2").bfloat16()) == torch.bfloat16
    assert compute_dtype(nn.Sequential(computing_in_bfloat16(make_model("qwen2")))) == torch.bfloat16
