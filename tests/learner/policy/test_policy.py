"""The policy as the learner trains it: no dropout anywhere, checkpointing that really checkpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3_5Config

from learner.forward.logprobs import token_logprobs
from learner.policy.model import load_policy
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.learner.policy.test_reference import a_batch
from tests.zoo.families import save_model


def test_gradient_checkpointing_runs_each_block_twice_and_changes_no_number() -> None:
    gradients = []
    for checkpointing, runs in ((False, 1), (True, 2)):
        policy = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=checkpointing)
        token_logprobs(policy, a_batch(), 1.0)  # the first one finds out what the model does to its logits
        calls: list[int] = []
        policy.transformer.h[0].ln_1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        logprobs_BT, _ = token_logprobs(policy, a_batch(), 1.0)
        logprobs_BT.sum().backward()
        assert len(calls) == runs
        gradients.append(policy.transformer.wte.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_dropout_of_the_checkpoint_is_off_so_that_two_passes_agree(tmp_path: Path, model: str) -> None:
    if model == "gpt2":
        GPT2LMHeadModel(
            GPT2Config(vocab_size=16, n_positions=32, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0.5)
        ).save_pretrained(tmp_path)
    else:
        LlamaForCausalLM(
            LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                        attention_dropout=0.5)
        ).save_pretrained(tmp_path)  # fmt: skip
    policy = load_policy(tmp_path, gradient_checkpointing=False)
    first_BT, _ = token_logprobs(policy, a_batch(), 1.0)
    second_BT, _ = token_logprobs(policy, a_batch(), 1.0)
    assert policy.training and torch.equal(first_BT, second_BT)


def test_logprobs_and_entropy_are_those_of_the_tempered_softmax() -> None:
    policy = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=False)
    batch = a_batch()
    logprobs_BT, entropy_BT = token_logprobs(policy, batch, 0.7, entropy="value")
    with torch.no_grad():
        logits = policy(batch.token_ids_N[None]).logits[0, 1:].double().numpy() / 0.7
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    targets = batch.targets_M.numpy()
    np.testing.assert_allclose(logprobs_BT[0].detach(), np.log(probabilities[np.arange(3), targets]), atol=1e-5)
    np.testing.assert_allclose(entropy_BT[0], -(probabilities * np.log(probabilities)).sum(-1), atol=1e-5)


@pytest.mark.parametrize("kind", ["Mistral3Config", "Qwen2VLConfig", "Qwen3VLConfig", "Gemma3Config"])
def test_a_multimodal_checkpoint_without_a_text_tower_of_its_own_is_refused(tmp_path: Path, kind: str) -> None:
    getattr(transformers, kind)().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no language model that can be trained by itself; set model to"):
        load_policy(tmp_path, gradient_checkpointing=False)


@pytest.mark.parametrize("section", ["top", "text_config"])
def test_a_quantized_checkpoint_is_refused_with_the_reason(tmp_path: Path, section: str) -> None:
    scales = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    config = LlamaConfig(**scales) if section == "top" else Qwen3_5Config(text_config=scales)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is quantized \(fp8\), and its scales would be missing in every push"):
        load_policy(tmp_path, gradient_checkpointing=False)


def test_of_a_multimodal_checkpoint_the_text_tower_is_loaded(tmp_path: Path) -> None:
    save_model("qwen3_5", tmp_path)
    policy = load_policy(tmp_path, gradient_checkpointing=False)
    assert type(policy).__name__ == "Qwen3_5ForCausalLM"
    logprobs_BT, _ = token_logprobs(policy, a_batch(), 1.0)
    logprobs_BT.sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())
