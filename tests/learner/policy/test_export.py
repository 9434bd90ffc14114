"""The model in a checkpoint, loaded by transformers, peft and another run."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from learner.config import LearnerRun
from learner.run_inputs import RunInputs
from learner.training.policy_trainer import make_trainer
from protocol.model_files import fingerprint, resolve_model
from tests.learner.checkpoints import save, weights_of
from tests.learner.policy.plain import plain_logits
from tests.learner.policy.tiny_policy import move
from tests.learner.runs import make_run
from tests.zoo.families import save_model

IDS = torch.arange(3, 15)[None]
LORA = {"lora": {"rank": 4}}


def a_run(tmp_path: Path, dtype: str = "float32", **learner: Any) -> LearnerRun:
    return msgspec.structs.replace(make_run(tmp_path, "tcp://127.0.0.1:1", **learner), dtype=dtype)


def trained_and_saved(accelerator: Accelerator, run: LearnerRun, tmp_path: Path) -> tuple[Any, Path]:
    """Return a policy with changed weights, and its checkpoint."""
    trainer = make_trainer(RunInputs(run), accelerator, is_new=True)
    move(trainer.policy, seed=1, scale=0.05)
    return trainer.policy, save(trainer, tmp_path, 7)


def test_transformers_loads_the_model_of_a_checkpoint_with_the_policys_logits(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    policy, checkpoint = trained_and_saved(accelerator, a_run(tmp_path), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    assert torch.equal(model(IDS).logits, plain_logits(policy, IDS))
    assert AutoTokenizer.from_pretrained(checkpoint / "model").decode(IDS[0]) == "23456789>+=,"
    assert GenerationConfig.from_pretrained(checkpoint / "model").eos_token_id == 0
    # Another run can start with it, and a server with the model of this run accepts its pushes.
    assert fingerprint(resolve_model(str(checkpoint / "model"))) == fingerprint(resolve_model("tiny:digits"))


def test_the_model_of_a_bfloat16_run_has_the_original_config_except_the_dtype(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1, tie_word_embeddings=False, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(base, max_shard_size="8KB")
    AutoTokenizer.from_pretrained(resolve_model("tiny:digits")).save_pretrained(base)
    before = json.loads((base / "config.json").read_text())
    before["torch_dtype"] = before.pop("dtype")
    (base / "config.json").write_text(json.dumps(before))
    run = msgspec.structs.replace(a_run(tmp_path, dtype="bfloat16"), model=str(base))
    policy, checkpoint = trained_and_saved(accelerator, run, tmp_path)
    del before["torch_dtype"]
    assert json.loads((checkpoint / "model" / "config.json").read_text()) == before | {"dtype": "bfloat16"}
    assert not (checkpoint / "model" / "model.safetensors.index.json").exists(), "a single file has no index"
    for name, parameter in AutoModelForCausalLM.from_pretrained(checkpoint / "model").named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, policy.get_parameter(name).bfloat16()), name
    assert weights_of(checkpoint)["lm_head.weight"].dtype == torch.float32, "a resume needs the trained weights"


def test_an_adapter_is_merged_into_the_model_and_also_saved_for_peft(accelerator: Accelerator, tmp_path: Path) -> None:
    policy, checkpoint = trained_and_saved(accelerator, a_run(tmp_path, **LORA), tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    torch.testing.assert_close(merged(IDS).logits, plain_logits(policy, IDS), atol=1e-5, rtol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(resolve_model("tiny:digits"))
    assert (base(IDS).logits - plain_logits(policy, IDS)).abs().max() > 0.1, "the adapter must have an effect"
    adapted = PeftModel.from_pretrained(base, checkpoint / "adapter")
    assert torch.equal(adapted(IDS).logits, plain_logits(policy, IDS))
    assert adapted.peft_config["default"].base_model_name_or_path == "tiny:digits"


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_exported_model_has_every_tensor_of_its_multimodal_checkpoint(
    accelerator: Accelerator, tmp_path: Path, is_tied: bool
) -> None:
    save_model("qwen3_5", tmp_path / "base")
    weights_file, config_file = tmp_path / "base" / "model.safetensors", tmp_path / "base" / "config.json"
    before = load_file(weights_file)
    if is_tied:  # the files of some models have both tensors nevertheless
        head = before["model.language_model.embed_tokens.weight"].clone()
        save_file(before | {"lm_head.weight": head}, weights_file, {"format": "pt"})
        config_file.write_text(
            config_file.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
        )
        del before["lm_head.weight"]
    run = msgspec.structs.replace(a_run(tmp_path), model=str(tmp_path / "base"))
    policy, checkpoint = trained_and_saved(accelerator, run, tmp_path)
    after = load_file(checkpoint / "model" / "model.safetensors")
    assert {name: one.shape for name, one in after.items()} == {name: one.shape for name, one in before.items()}
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]) == ("visual" in name), name
    model = AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    assert torch.equal(model(IDS).logits, plain_logits(policy, IDS))


def test_an_exported_model_has_every_chat_template_of_the_original(accelerator: Accelerator, tmp_path: Path) -> None:
    shutil.copytree(resolve_model("tiny:digits"), tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tokenizer.save_pretrained(tmp_path / "base")
    run = msgspec.structs.replace(a_run(tmp_path), model=str(tmp_path / "base"))
    _, checkpoint = trained_and_saved(accelerator, run, tmp_path)
    assert AutoTokenizer.from_pretrained(checkpoint / "model").chat_template == tokenizer.chat_template


def test_a_checkpoint_without_an_export_has_no_model(accelerator: Accelerator, tmp_path: Path) -> None:
    run = a_run(tmp_path, checkpoint={"export_model": False}, **LORA)
    _, checkpoint = trained_and_saved(accelerator, run, tmp_path)
    assert all(".lora_" in name for name in weights_of(checkpoint))
    assert not (checkpoint / "model").exists() and not (checkpoint / "adapter").exists()
