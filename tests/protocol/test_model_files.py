"""Model files: the built-in tiny model, local directories, and fingerprints that depend only on contents."""

import json
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.builtin_models.tiny_digits import CHARACTERS
from protocol.errors import ConfigError
from protocol.model_files import end_token_ids, fingerprint, local_model, resolve_model, weight_bytes, weight_files

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(tmp_path_factory.mktemp("home")))
        return resolve_model("tiny:digits")


@pytest.fixture
def copy(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "copy")


def test_importing_model_files_loads_no_torch_transformers_or_vllm():
    code = "import sys, protocol, protocol.model_files; print({'torch', 'transformers', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_tiny_model_has_no_dropout_and_its_tokenizer_gives_back_the_exact_text(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.resid_pdrop == model.config.embd_pdrop == model.config.attn_pdrop == 0
    for text in ("48213907>", "1 + 2 = 3, 4", "  0", CHARACTERS):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id]) == text + "<eos>"
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.config.vocab_size == len(tokenizer)


def test_the_tiny_model_is_created_once_and_identically_by_concurrent_processes(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    (tmp_path / ".tiny-digits-v1-abcd1234").mkdir()  # left by a killed process
    with ThreadPoolExecutor(2) as racers:
        made = {*racers.map(resolve_model, ["tiny:digits"] * 2)}
    assert made == {tmp_path / "tiny-digits-v1"}
    assert {path.name for path in tmp_path.iterdir()} == {"tiny-digits-v1", ".tiny-digits-v1.lock"}
    weights = tmp_path / "tiny-digits-v1" / "model.safetensors"
    assert weights.read_bytes() == (tiny / "model.safetensors").read_bytes()
    assert fingerprint(weights.parent) == fingerprint(tiny)
    made_at = weights.stat().st_mtime_ns
    assert resolve_model("tiny:digits") == weights.parent and weights.stat().st_mtime_ns == made_at


def test_a_fingerprint_depends_on_contents_and_not_on_dates_or_weights(tiny, copy):
    for file in copy.iterdir():
        os.utime(file, (0, 0))
    (copy / "model.safetensors").unlink()
    (copy / "README.md").write_text("mine")
    assert fingerprint(copy) == fingerprint(tiny)
    assert (fingerprint(tiny).architecture, len(fingerprint(tiny).tokenizer_hash)) == ("GPT2LMHeadModel", 16)

    tokenizer = (copy / "tokenizer.json").read_text()
    (copy / "tokenizer.json").write_text(tokenizer.replace('"<eos>"', '"<end>"'))
    assert fingerprint(copy).tokenizer_hash != fingerprint(tiny).tokenizer_hash


def test_a_directory_that_is_not_a_model_is_an_error_with_the_reason(copy, tmp_path):
    def refused(look, path, match):
        with pytest.raises(ConfigError, match=match):
            look(path)

    for content in (b"[]", b"{", b"\xff"):
        (copy / "config.json").write_bytes(content)
        refused(resolve_model, str(copy), r"copy/config.json cannot be read: .*; expected a Hugging Face model")
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    refused(resolve_model, str(copy), r"no weights in \*\.safetensors")
    refused(resolve_model, str(tmp_path), r"without config.json")
    (tmp_path / "config.json").write_text('{"architectures": ["A"], "vocab_size": 3}')
    refused(fingerprint, tmp_path, "has no tokenizer")


def test_an_unknown_model_name_is_an_error_with_the_options(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, expected in {
        "tiny:letters": "'tiny:letters' is not a built-in model. Use one of 'tiny:digits', 'smollm2:135m-instruct'",
        "./no/such": "is not an existing directory",
        "nobody/none": "'nobody/none' is not a local directory and cannot be downloaded",
        "no such name": "is not a local directory and cannot",
    }.items():
        with pytest.raises(ConfigError, match=expected):
            resolve_model(name)


@pytest.mark.parametrize(
    ("file", "settings", "method"),
    [
        ("config.json", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ("config.json", {"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ("config.json", {"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ("config.json", {"quantization_config": {"weights": "int8"}}, "quantization_config"),
        ("config.json", {"compression_config": {"format": "pack-quantized"}}, "pack-quantized"),
        ("config.json", {"thinker_config": {"text_config": {"quantization_config": {"quant_method": "awq"}}}}, "awq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "FP8, in hf_quant_config.json"),
        ("quantize_config.json", {"bits": 4}, "quantize_config.json, in quantize_config.json"),
    ],
)
def test_a_quantized_checkpoint_is_rejected_by_both_sides_with_its_method(copy, file, settings, method):
    known = json.loads((copy / file).read_text()) if (copy / file).exists() else {}
    (copy / file).write_text(json.dumps(known | settings))
    for look in (resolve_model, local_model):
        with pytest.raises(ConfigError) as refused:
            look(str(copy))
        assert f"model = {str(copy)!r} is quantized ({method}), but only bfloat16" in str(refused.value)
        assert "set model to the original checkpoint" in str(refused.value)


def test_a_checkpoint_with_an_empty_quantization_is_not_quantized(tiny, copy):
    for settings in ({"quantization_config": None}, {"quantization_config": {}}, {"text_config": None}):
        config = json.loads((tiny / "config.json").read_text()) | settings
        (copy / "config.json").write_text(json.dumps(config))
        assert resolve_model(str(copy)) == copy and fingerprint(copy) == fingerprint(tiny)


def test_the_bytes_of_weights_are_in_the_compute_dtype(tiny, tmp_path):
    tensors = load_file(tiny / "model.safetensors")
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    assert weight_bytes(tiny, "float32") == 4 * num_parameters and weight_bytes(tiny, "bfloat16") == 2 * num_parameters
    sharded = shutil.copytree(tiny, tmp_path / "sharded")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, of_file in shards.items():
        save_file({name: tensors[name] for name in of_file}, sharded / file, metadata={"format": "pt"})
    (sharded / "model.safetensors").rename(sharded / "consolidated.safetensors")
    weight_map = {name: file for file, of_file in shards.items() for name in of_file}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert weight_bytes(sharded, "bfloat16") == 2 * num_parameters
    assert [file.name for file in weight_files(sharded)] == sorted(shards)
    assert resolve_model(str(sharded)) == sharded
    save_file({"steps": torch.zeros(3, dtype=torch.int64), "weight": torch.zeros(5)}, tmp_path / "model.safetensors")
    assert weight_bytes(tmp_path, "bfloat16") == 3 * 8 + 5 * 2
    (sharded / "model-00001-of-00002.safetensors").write_bytes(b"half of it")
    with pytest.raises(ConfigError, match=r"model-00001-of-00002.safetensors of `model` cannot be read as safetensors"):
        weight_bytes(sharded, "float32")


def cut_off(model):
    os.truncate(model / "model.safetensors", 200_000)


def lose_a_shard(model):
    weight_map = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def empty_the_index(model):
    (model / "model.safetensors.index.json").write_text("{}")


def leave_a_pointer(model):
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 1\n")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (cut_off, r"model.safetensors of `model` .* \(it has 200000 bytes, but 4\d+ by its header\); .* download"),
        (lose_a_shard, r"model-00002-of-00002.safetensors of `model` .* No such file"),
        (empty_the_index, r"index.json has no weight_map"),
        (leave_a_pointer, r"is it a git-lfs pointer\?\); .*`git lfs pull`"),
    ],
)
def test_a_model_whose_weights_are_incomplete_is_an_error_with_the_file(copy, damage, expected):
    damage(copy)
    with pytest.raises(ConfigError, match=expected):
        resolve_model(str(copy))


def test_end_tokens_that_are_text_are_an_error(copy):
    (copy / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ConfigError, match=r"generation_config.json has eos_token_id \['</s>'\]; expected an int"):
        end_token_ids(copy)


def test_the_matrices_of_a_quantized_model_have_a_byte_for_each_number(tmp_path):
    shapes = {
        "model.embed_tokens.weight": (7, 4), "lm_head.weight": (7, 4), "transformer.wte.weight": (7, 4),
        "model.layers.0.mlp.up_proj.weight": (6, 4), "model.layers.0.mlp.up_proj.bias": (6,),
        "model.norm.weight": (4,), "conv.weight": (4, 1, 3),
    }  # fmt: skip
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    whole = weight_bytes(tmp_path, "bfloat16")
    assert whole == 2 * sum(math.prod(shape) for shape in shapes.values())
    assert weight_bytes(tmp_path, "bfloat16", quantized=True) == whole - 6 * 4


def test_a_model_of_which_only_a_part_is_cached_is_not_local(tiny, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--one--of-them" / "snapshots" / "0123abcd"
    shutil.copytree(tiny, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "models--one--of-them" / "refs").mkdir()
    (tmp_path / "models--one--of-them" / "refs" / "main").write_text("0123abcd")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert local_model("one/of-them") is None
    shutil.copy(tiny / "model.safetensors", snapshot)
    assert local_model("one/of-them") == snapshot
    lose_a_shard(snapshot)
    assert local_model("one/of-them") is None, "another program is downloading it"
