"""The policy as the learner trains it: without noise, checkpointing that really checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from learner.forward.attention import NAME
from learner.forward.logprobs import token_logprobs
from learner.forward.packing_check import choose_attention
from learner.policy.model import load_config, load_policy, load_tokenizer
from learner.policy.published import PublishedPolicy
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.learner.policy.tiny_policy import a_batch
from tests.sweep.families import tiny_config, tiny_model


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


NOISE: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.5},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "bert": {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5},
    "opt": {"dropout": 0.5, "layerdrop": 0.5},
    "mpt": {"attn_config": {"attn_pdrop": 1}},
    "phimoe": {"router_jitter_noise": 0.1, "input_jitter_noise": 0.5},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.5}},
}
"""Dropout and jitter by the names that families have for it."""


@pytest.mark.parametrize(("family", "noise"), NOISE.items(), ids=NOISE)
def test_with_checkpointing_too_a_policy_computes_as_the_model_samples_whatever_noise_training_would_have(
    tmp_path: Path, family: str, noise: dict[str, Any]
) -> None:
    tiny_model(tiny_config(family, **noise)).save_pretrained(tmp_path)
    policy = load_policy(tmp_path, gradient_checkpointing=True)
    found_BT, _ = token_logprobs(policy, a_batch(), 1.0)
    sampler = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        right_TV = sampler(a_batch().token_ids_N[None]).logits[0, 1:].log_softmax(-1)
    right_T = right_TV[torch.arange(3), a_batch().targets_M]
    torch.testing.assert_close(found_BT[0].detach(), right_T, atol=1e-5, rtol=0)


def test_a_config_that_asks_for_more_than_logits_costs_no_pass_anything(tmp_path: Path) -> None:
    """An earlier training with an auxiliary loss of the routers leaves such a config."""
    tiny_model(tiny_config("mixtral")).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    more = dict.fromkeys(("output_router_logits", "output_hidden_states", "output_attentions"), True)
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    policy = load_policy(tmp_path, gradient_checkpointing=False)
    assert set(policy(torch.arange(3, 15)[None], use_cache=False)) == {"logits"}
    choose_attention(policy, torch.device("cpu"), torch.float32)
    assert policy.config._attn_implementation == NAME


@pytest.mark.parametrize("kind", ["Mistral3Config", "Gemma3Config"])
def test_a_multimodal_checkpoint_without_a_text_tower_of_its_own_is_refused(tmp_path: Path, kind: str) -> None:
    getattr(transformers, kind)().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no separate language model to train; set model to"):
        load_policy(tmp_path, gradient_checkpointing=False)


@pytest.mark.parametrize("load", [load_config, load_tokenizer])
def test_code_of_a_model_does_not_run_even_where_someone_would_say_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[Path], Any]
) -> None:
    monkeypatch.setattr("builtins.input", lambda question: "y")
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'has_run')!r}, 'x')")
    names = {"auto_map": {"AutoConfig": "code.Mine", "AutoTokenizer": ["code.Mine", None]}}
    for file in ("config.json", "tokenizer_config.json"):
        (tmp_path / file).write_text(json.dumps({"model_type": "mine", "tokenizer_class": "Mine"} | names))
    with pytest.raises(ConfigError, match=r"cannot load .* contains custom code [^;]*; set model to one that"):
        load(tmp_path)
    assert not (tmp_path / "has_run").exists()


def test_a_model_that_transformers_does_not_know_is_an_error_with_its_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    with pytest.raises(
        ConfigError, match=r"model type `mine` but Transformers does not recognize [^;]*; set model to one"
    ):
        load_config(tmp_path)


def test_files_that_transformers_cannot_load_are_an_error_with_its_whole_reason(tmp_path: Path) -> None:
    shutil.copytree(resolve_model("tiny:digits"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(
        ConfigError, match=r"cannot load .* backend tokenizer from one of: .*serialization file"
    ) as error:
        load_tokenizer(tmp_path)
    assert "set model to" not in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the tokenizer in .* has no 'added_tokens'"):
        load_tokenizer(tmp_path)


def test_a_model_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    """transformers makes one without tokens from config.json."""
    tiny = resolve_model("tiny:digits")
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tokenizer*", "*.txt"))
    with pytest.raises(ConfigError, match=r"has no tokenizer; expected tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("on_meta", [False, True])
def test_files_without_some_of_the_models_tensors_are_an_error(tmp_path: Path, on_meta: bool) -> None:
    """transformers would initialize those at random."""
    model = tiny_model(tiny_config("llama"))
    model.save_pretrained(tmp_path)

    def refused(tensors: dict[str, torch.Tensor], match: str) -> None:
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=match):
            load_policy(tmp_path, gradient_checkpointing=False, on_meta=on_meta)

    tensors = load_file(tmp_path / "model.safetensors")
    headless = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    refused(headless, r"lack 1 of the model's tensors, such as lm_head.weight; .* without its language model head")
    refused(tensors | {"model.norm.weight": torch.ones(3)}, r"model.norm.weight has the shape \(3,\) in the files")


def test_the_policy_has_the_weights_of_the_newest_save_and_of_no_pickle(tmp_path: Path) -> None:
    first, second, third = (tiny_model(tiny_config("llama"), seed=seed) for seed in range(3))
    first.save_pretrained(tmp_path)
    second.save_pretrained(tmp_path, max_shard_size="100KB")
    torch.save(third.state_dict(), tmp_path / "pytorch_model.bin")
    assert {"model.safetensors", "model.safetensors.index.json"} <= {file.name for file in tmp_path.iterdir()}

    def loads(model: PreTrainedModel) -> bool:
        policy = load_policy(tmp_path, gradient_checkpointing=False)
        return all(torch.equal(one, policy.state_dict()[name]) for name, one in model.state_dict().items())

    assert loads(second)
    for file in tmp_path.glob("model*.safetensors*"):
        file.unlink()
    save_file(first.state_dict(), tmp_path / "renamed.safetensors", {"format": "pt"})
    assert loads(first)


def test_weights_are_published_on_the_very_device_that_holds_them(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate calls the device of one rank "cuda", which is not equal to "cuda:0": then a sync would copy what it
    can send."""
    assert torch.device("cpu", 0) != torch.device("cpu")
    monkeypatch.setattr(Accelerator, "device", property(lambda _: torch.device("cpu", 0)))
    policy = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=False)
    published = PublishedPolicy(accelerator, policy, torch.float32)
    assert {tensor.device for _, tensor in published.tensors()} == {published.device}
