"""The policy in Hugging Face's format, which `vllm serve`, `from_pretrained` and the key `model` of another run take.

    model/      the weights that a push of the same version gives the server: in the run's dtype, an adapter merged into them
    adapter/    with LoRA: the adapter alone, as peft writes it

Between a checkpoint and everyone else. Every file of model/ but the weights is that of the model the run began with, so the
tokenizer's hash, and with it the fingerprint, stay the same.
"""

import json
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from peft import PeftConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from learner.config import LearnerRun
from learner.policy.lora import ADAPTER_NAME, has_adapter
from learner.policy.published import PublishedPolicy
from protocol.model_files import text_files


def export_policy(published: PublishedPolicy, run: LearnerRun, model_path: Path, directory: Path) -> None:
    """Write into `directory`; `model_path` is that of the model the run began with. Rank 0's alone, as a push is. It holds the
    weights once more, in the host's memory.
    """
    dtype = getattr(torch, run.dtype)
    state = {name: tensor.detach().to(dtype).cpu() for name, tensor in published.tensors()}
    state |= _of_towers(published.model, model_path, state.keys())
    published.model.save_pretrained(directory / "model", state_dict=state, save_original_format=False)  # it is that
    _restore_files(model_path, run.dtype, directory / "model")
    if has_adapter(published.model):
        _export_adapter(published.model, run.model, directory / "adapter")


def _of_towers(policy: PreTrainedModel, model_path: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """What a multimodal checkpoint has besides the text tower that is trained: as it was."""
    if json.loads((model_path / "config.json").read_text())["model_type"] == policy.config.model_type:
        return {}
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model_path.glob("*.safetensors")):
        tensors |= load_file(file)
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def _restore_files(model_path: Path, dtype: str, directory: Path) -> None:
    # Over the config of the policy, which is in float32 and without dropout.
    for file in text_files(model_path):
        shutil.copyfile(file, directory / file.name)
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)  # the name of the key before transformers 5
    config_file.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")


def _export_adapter(policy: PreTrainedModel, base: str, directory: Path) -> None:
    directory.mkdir()
    config = replace(cast(PeftConfig, policy.peft_config[ADAPTER_NAME]), base_model_name_or_path=base)
    config.save_pretrained(str(directory))
    state = get_peft_model_state_dict(policy, adapter_name=ADAPTER_NAME)
    tensors = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
