"""The policy in Hugging Face's format, which `vllm serve`, `from_pretrained` and the key `model` of another run take.

    model/      the weights that a push of the same version gives the server: in the run's dtype, an adapter merged into them
    adapter/    with LoRA: the adapter alone, as peft writes it

Between a checkpoint and everyone else: copied while training waits, written while it goes on. Every file of model/ but the weights
is that of the model the run began with, so the tokenizer's hash, and with it the fingerprint, stay the same.
"""

import inspect
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import torch
from huggingface_hub import save_torch_state_dict
from peft import PeftConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from learner.config import LearnerRun
from learner.policy.lora import ADAPTER_NAME, has_adapter
from learner.policy.published import PublishedPolicy
from learner.policy.shards import Tensors
from protocol.model_files import text_files, weight_files

# One line per file it saves, by a logger that is named after its file.
logging.getLogger(inspect.getfile(save_torch_state_dict)).setLevel(logging.WARNING)


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of the policy in the host's memory, which training does not touch."""

    model_path: Path
    """Of the model that the run began with."""
    dtype: str
    model: Tensors
    keeps_towers: bool
    """The checkpoint has more than the text tower that is trained: the rest stays as it was."""
    adapter: Tensors | None
    adapter_config: PeftConfig | None

    def write(self, directory: Path) -> None:
        """Raises OSError, SafetensorError or RuntimeError if it cannot be written."""
        tensors = self.model | self._of_towers()
        (directory / "model").mkdir()
        save_torch_state_dict(tensors, directory / "model", max_shard_size="50GB")  # as `save_pretrained` does
        _restore_files(self.model_path, self.dtype, directory / "model")
        if self.adapter is not None and self.adapter_config is not None:
            (directory / "adapter").mkdir()
            self.adapter_config.save_pretrained(str(directory / "adapter"))
            save_file(self.adapter, directory / "adapter" / "adapter_model.safetensors")

    def _of_towers(self) -> Tensors:
        if not self.keeps_towers:
            return {}
        tensors: Tensors = {}
        for file in weight_files(self.model_path):
            tensors |= load_file(file)
        return {name: tensor for name, tensor in tensors.items() if name not in self.model}


def copy_for_export(published: PublishedPolicy, run: LearnerRun, model_path: Path) -> Export:
    """Gather, merge and cast one tensor at a time. Rank 0's alone, as a push is."""
    dtype, policy = getattr(torch, run.dtype), published.model
    began_with = json.loads((model_path / "config.json").read_text())["model_type"]
    return Export(
        model_path=model_path,
        dtype=run.dtype,
        model={name: tensor.detach().to("cpu", dtype, copy=True) for name, tensor in published.tensors()},
        keeps_towers=began_with != policy.config.model_type,
        adapter=_adapter(published) if has_adapter(policy) else None,
        adapter_config=_adapter_config(policy, run.model) if has_adapter(policy) else None,
    )


def _adapter(published: PublishedPolicy) -> Tensors:
    state = get_peft_model_state_dict(published.model, dict(published.adapter()), ADAPTER_NAME)
    return {
        f"base_model.model.{name}": tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in state.items()
    }


def _adapter_config(policy: PreTrainedModel, base: str) -> PeftConfig:
    return replace(cast(PeftConfig, policy.peft_config[ADAPTER_NAME]), base_model_name_or_path=base)


def _restore_files(model_path: Path, dtype: str, directory: Path) -> None:
    # Over the config of the policy, which is in float32 and without dropout.
    for file in text_files(model_path):
        shutil.copyfile(file, directory / file.name)
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)  # the name of the key before transformers 5
    config_file.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
