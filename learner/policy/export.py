"""The policy in Hugging Face's format, which `vllm serve`, `from_pretrained` and the key `model` of another run take.

    model/      the weights that a push of the same version gives the server: in the run's dtype, an adapter merged into them
    adapter/    with LoRA: the adapter alone, as peft writes it

Between a checkpoint and everyone else. Every file of model/ but the weights is that of the model the run began with, so the
tokenizer's hash, and with it the fingerprint, stay the same.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from peft import PeftConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import PreTrainedModel

from learner.config import LearnerRun
from learner.policy.lora import ADAPTER_NAME, merged_tensors
from learner.policy.snapshot import reshard, whole
from protocol.model_files import resolve_model, text_files


def export_policy(policy: PreTrainedModel, run: LearnerRun, directory: Path, *, is_writer: bool) -> None:
    """Write into `directory`. The rank that does holds the weights once more, in the host's memory; of a sharded policy all
    ranks call it, to gather one tensor at a time.
    """
    dtype = getattr(torch, run.dtype)
    state = {}
    reshard(policy)
    for name, tensor in merged_tensors(policy) if run.learner.lora.rank else policy.named_parameters():
        gathered = whole(tensor.detach().to(dtype))
        if is_writer:
            state[name] = gathered.cpu()
    if not is_writer:
        return
    _export_model(policy, state, run, directory / "model")
    if run.learner.lora.rank:
        _export_adapter(policy, run, directory / "adapter")


def _export_model(policy: PreTrainedModel, state: dict[str, torch.Tensor], run: LearnerRun, directory: Path) -> None:
    policy.save_pretrained(directory, state_dict=state)
    # Over the config of the policy, which is in float32 and without dropout.
    for file in text_files(resolve_model(run.model)):
        shutil.copyfile(file, directory / file.name)
    config_file = directory / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)  # the name of the key before transformers 5
    config_file.write_text(json.dumps(config | {"dtype": run.dtype}, indent=2) + "\n")


def _export_adapter(policy: PreTrainedModel, run: LearnerRun, directory: Path) -> None:
    directory.mkdir()
    config = replace(cast(PeftConfig, policy.peft_config[ADAPTER_NAME]), base_model_name_or_path=run.model)
    config.save_pretrained(str(directory))
    state = get_peft_model_state_dict(policy, adapter_name=ADAPTER_NAME)
    tensors = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / "adapter_model.safetensors")
