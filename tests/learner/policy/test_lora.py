"""LoRA: peft's own merge is the yardstick for what is pushed; whole runs show what is trained and watched."""

import copy
from pathlib import Path
from typing import Any

import msgspec
import peft
import pytest
import torch
from accelerate import Accelerator
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from learner.config import LoraConfig
from learner.forward.logprobs import token_logprobs
from learner.policy import lora
from learner.policy.lora import add_adapter, delta
from learner.policy.model import load_policy
from learner.policy.published import PublishedPolicy
from learner.policy.snapshot import trainable
from learner.train import train
from protocol.errors import ConfigError, ParityError
from protocol.messages import AdapterSpec
from protocol.model_files import resolve_model
from protocol.weights.buckets import make_manifest, split_into_buckets
from tests.learner.model_engine import tiny_server
from tests.learner.policy.tiny_policy import a_batch, merged_tensors
from tests.learner.runs import make_run, seeded
from tests.zoo.families import make_model

RANK_4 = LoraConfig(rank=4, alpha=6.0)
LORA: dict[str, Any] = {"lora": {"rank": 4}, "optimizer": {"learning_rate": 5e-3}}


def a_model(kind: str) -> PreTrainedModel:
    if kind == "gpt2":
        return AutoModelForCausalLM.from_pretrained(resolve_model("tiny:digits"), dtype=torch.float32)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=kind == "llama_tied",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def with_adapter(kind: str, config: LoraConfig = RANK_4) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model and the same with an adapter that has been somewhere: B is no longer zero."""
    base = a_model(kind)
    policy = copy.deepcopy(base)
    add_adapter(policy, config, seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in trainable(policy).values():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 5
    return base, policy


@pytest.mark.parametrize("kind", ["gpt2", "llama_tied", "llama_untied"])
def test_what_is_pushed_is_what_peft_itself_merges(kind: str) -> None:
    base, policy = with_adapter(kind)
    names, ids = [name for name, _ in base.named_parameters()], torch.arange(3, 15)[None]
    assert (base(ids).logits - policy(ids).logits).abs().max() > 0.01
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", fan_in_fan_out=kind == "gpt2")
    theirs = peft.get_peft_model(base, config)
    with torch.no_grad():
        trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
        assert {f"base_model.model.{name}" for name in trainable(policy)} == trained.keys()
        for name, parameter in trainable(policy).items():
            trained[f"base_model.model.{name}"].copy_(parameter)
    unmerged = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    pushed, merged = merged_tensors(policy), theirs.merge_and_unload()
    assert list(pushed) == names and not any(tensor.requires_grad for tensor in pushed.values())
    for name, tensor in pushed.items():
        torch.testing.assert_close(tensor, merged.state_dict()[name], atol=1e-6, rtol=0)
    torch.testing.assert_close(merged(ids).logits, policy(ids).logits, atol=1e-5, rtol=1e-5)
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, unmerged[name])


def test_what_all_linear_leaves_frozen_is_logged_with_its_share(caplog: pytest.LogCaptureFixture) -> None:
    dense, experts = make_model("qwen3"), make_model("qwen3_moe")
    add_adapter(dense, RANK_4, seed=0)
    assert "leaves" not in caplog.text
    frozen = [one.numel() for name, one in experts.named_parameters() if "experts" in name or "gate.weight" in name]
    share = 100 * sum(frozen) / sum(one.numel() for one in experts.parameters())
    add_adapter(experts, RANK_4, seed=0)
    names = (
        "model.layers.*.mlp.gate.weight, model.layers.*.mlp.experts.gate_up_proj, model.layers.*.mlp.experts.down_proj"
    )
    assert set(names.split(", ")) == set(caplog.text.partition("leaves ")[2].partition(" frozen")[0].split(", "))
    assert f"({share:.0f} % of the parameters)" in caplog.text


def published(policy: PreTrainedModel) -> PublishedPolicy:
    return PublishedPolicy(Accelerator(cpu=True), policy, torch.float32)


@pytest.mark.parametrize("kind", ["gpt2", "llama_tied", "llama_untied"])
def test_frozen_weights_and_an_adapter_sent_alone_add_up_to_what_is_pushed_merged(kind: str) -> None:
    base, policy = with_adapter(kind)
    sent = published(policy)
    frozen, adapter, merged = map(dict, (sent.frozen_tensors(), sent.adapter_tensors(), sent.tensors()))
    assert list(frozen) == list(merged)
    assert all(torch.equal(tensor, base.state_dict()[name]) for name, tensor in frozen.items())
    assert sent.adapter == AdapterSpec(rank=4, num_tensors=len(adapter)) and sent.why_merged is None
    for name in [name.removesuffix(".lora_A.weight") for name in adapter if name.endswith(".lora_A.weight")]:
        change = adapter.pop(f"{name}.lora_B.weight") @ adapter.pop(f"{name}.lora_A.weight")
        weight = frozen.pop(f"{name}.weight")
        summed = weight + (change.T if kind == "gpt2" else change)
        torch.testing.assert_close(summed, merged[f"{name}.weight"], atol=1e-6, rtol=0)
        assert not torch.equal(weight, merged[f"{name}.weight"])
    assert not adapter and all(torch.equal(tensor, merged[name]) for name, tensor in frozen.items())


def test_an_adapter_of_the_lm_head_is_only_sent_merged() -> None:
    _, policy = with_adapter("llama_untied", LoraConfig(rank=2, target_modules=("q_proj", "lm_head")))
    assert published(policy).why_merged == "learner.lora.target_modules contains the LM head (lm_head)"


def test_rank_16_on_all_layers_of_half_a_billion_weights_is_less_than_2_percent_of_them() -> None:
    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        policy = Qwen2ForCausalLM(config)
        add_adapter(policy, LoraConfig(rank=16), seed=0)
    sent = published(policy)
    tensors = [*sent.frozen_tensors(), *sent.adapter_tensors()]
    manifest = make_manifest(tensors, torch.bfloat16, 256 << 20, "dense", sent.adapter)
    later, whole = (
        sum(bucket.num_bytes for bucket in split_into_buckets(one))
        for one in (manifest.of_later_syncs(), make_manifest(sent.tensors(), torch.bfloat16, 256 << 20))
    )
    assert 0.017 < later / whole < 0.02


def test_the_adapter_starts_as_nothing_and_alone_has_gradients() -> None:
    base = a_model("gpt2")
    policy = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=True)
    add_adapter(policy, RANK_4, seed=0)
    logprobs_BT, _ = token_logprobs(policy, a_batch(), 1.0)
    torch.testing.assert_close(logprobs_BT, token_logprobs(base, a_batch(), 1.0)[0], atol=1e-6, rtol=0)
    logprobs_BT.sum().backward()
    with_gradient = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert with_gradient == trainable(policy).keys() and len(with_gradient) == 16
    assert any(p.grad.abs().sum() > 0 for p in trainable(policy).values())


def test_the_seed_alone_decides_how_the_adapter_starts() -> None:
    starts = []
    for seed, drawn_before in ((3, 0), (3, 17), (4, 0)):
        policy = a_model("gpt2")
        torch.manual_seed(seed)
        torch.rand(drawn_before)
        before = torch.get_rng_state()
        add_adapter(policy, RANK_4, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        starts.append(trainable(policy)["transformer.h.1.mlp.c_fc.lora_A.default.weight"])
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


def test_over_a_bfloat16_base_the_adapter_is_float32_and_so_is_the_sum() -> None:
    policy = a_model("llama_untied").bfloat16()
    add_adapter(policy, RANK_4, seed=0)
    assert {p.dtype for p in trainable(policy).values()} == {torch.float32}
    name = "model.layers.0.self_attn.q_proj"
    small = 1e-6 * torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    trainable(policy)[f"{name}.lora_B.default.weight"].data = small
    weight = policy.get_submodule(name).base_layer.weight
    assert weight.dtype == torch.bfloat16
    a = trainable(policy)[f"{name}.lora_A.default.weight"]
    pushed = merged_tensors(policy)[f"{name}.weight"]
    torch.testing.assert_close(pushed, weight.float() + 6.0 / 4 * small @ a, atol=1e-9, rtol=0)
    assert pushed.dtype == torch.float32 and not torch.equal(pushed, weight.float())


def test_named_layers_alone_are_adapted() -> None:
    policy = a_model("llama_untied")
    add_adapter(policy, LoraConfig(rank=2, target_modules=("q_proj", "layers.1.mlp.up_proj", "lm_head")), seed=0)
    layers = {name.partition(".lora_")[0] for name in trainable(policy)}
    attention = {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    assert layers == {*attention, "model.layers.1.mlp.up_proj", "lm_head"}


@pytest.mark.parametrize(
    ("kind", "target", "expected"),
    [
        ("gpt2", "q_proj", r"model is named 'q_proj'; use some of: c_attn, c_fc, c_proj, lm_head"),
        ("llama_untied", "proj", "no linear layer of this model is named 'proj'"),
        ("llama_untied", "embed_tokens", "no linear layer of this model is named 'embed_tokens'"),
        ("llama_tied", "lm_head", "LM head, whose weight is also the input embedding of this model"),
    ],
)
def test_a_target_that_cannot_be_adapted_is_refused(kind: str, target: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        add_adapter(a_model(kind), LoraConfig(rank=2, target_modules=(target,)), seed=0)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rank": -1}, "rank = -1 must not be negative"),
        ({"rank": 4, "alpha": 0.0}, r"alpha = 0\.0 must be above 0"),
        ({"rank": 4, "target_modules": []}, "adapts nothing"),
    ],
)
def test_a_lora_section_that_makes_no_sense_is_refused(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=expected):
        msgspec.convert(keys, LoraConfig)


def test_a_merge_with_the_wrong_scale_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "delta", lambda *layer_and_low_rank: 2 * delta(*layer_and_low_rank))
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, **seeded(), **LORA, parity={"every_steps": 1})
        with pytest.raises(ParityError, match=r"mean .Δ logprob. of texts of the step"):
            train(run, resume=False)
