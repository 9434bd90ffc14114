"""Writer of a checkpoint's policy as a plain Hugging Face directory, for transformers, peft and vLLM.

    model/ of the checkpoint, in the dtype ─────────────▶ copied ─┐
    model/ in float32 ───────────────▶ the policy ─▶ cast ────────┼─▶ safetensors, configs, tokenizer, chat template
    trained/ and the files of `model` ─▶ the policy ─▶ merged ────┘
    adapter/, or A and B in trained/ ───────────────────────────────▶ adapter in peft's form

Invariant: every weight is rounded at most once, from the value that the run trained. A directory is complete,
because it is renamed into place.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from learner.config import LearnerRun
from learner.policy.lora import add_adapter
from learner.policy.model import load_policy
from learner.policy.published import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Export, PublishedPolicy, copy_for_export
from learner.policy.shards import Tensors, read_policy
from learner.run_inputs import digest_model
from learner.storage.checkpoint import TRAINED, require_same_model
from protocol.errors import ConfigError, SlipstreamError
from protocol.model_files import resolve_model

Form = Literal["model", "adapter"]


class ExportError(SlipstreamError):
    """The export could not be read or written."""


@contextmanager
def complete_directory(directory: Path) -> Iterator[Path]:
    """Yield a path to write to; rename it to `directory` in the end, or remove it after an error.

    Raises:
        ExportError: A file could not be read or written.
    """
    parent: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        parent = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent))
        aside = parent / directory.name  # inside, because others may not read what mkdtemp makes
        yield aside
        if directory.is_dir():
            directory.rmdir()  # an empty one; any other was refused before
        aside.rename(directory)
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"{directory} could not be written ({error}); check the space and the permissions there. If a running "
            "learner has removed the checkpoint meanwhile, export another one"
        ) from error
    finally:
        if parent is not None:
            shutil.rmtree(parent, ignore_errors=True)


def write_model(run: LearnerRun, checkpoint: Path, dtype: str, directory: Path) -> None:
    """Write the policy, with its adapter merged, into a new directory.

    Raises:
        ConfigError: The checkpoint does not have the weights in enough precision.
        OSError, SafetensorError: A file cannot be read or written.
    """
    exported = checkpoint / "model"
    has_model, is_resumable = exported.is_dir(), (checkpoint / TRAINED).is_dir()
    if has_model and run.dtype == dtype:
        shutil.copytree(exported, directory)
        return
    if not is_resumable and run.dtype != "float32":
        raise ConfigError(
            f"--dtype {dtype}: {checkpoint} is one of the best checkpoints, which keep only their model, in "
            f"{run.dtype}; omit --dtype, or export one of the newest checkpoints (learner.checkpoint.keep_last)"
        )
    export = loaded(run, exported, dtype) if has_model and run.dtype == "float32" else rebuilt(run, checkpoint, dtype)
    _require_finite(export.model, dtype)
    export.write_model(directory)


def write_adapter(run: LearnerRun, checkpoint: Path, base: str, dtype: str, directory: Path) -> None:
    """Write the adapter alone into a new directory, for peft and `vllm serve --lora-modules`.

    `base` is the name of the base model in its config.

    Raises:
        ConfigError, OSError, SafetensorError: As in `write_model`.
    """
    if (checkpoint / "adapter").is_dir():
        shutil.copytree(checkpoint / "adapter", directory)
    else:
        rebuilt(run, checkpoint, run.dtype).write_adapter(directory)
    config_file, weights = directory / ADAPTER_CONFIG, directory / ADAPTER_WEIGHTS
    # Without a task type, AutoPeftModelForCausalLM refuses the adapter.
    config = json.loads(config_file.read_text("utf-8")) | {"base_model_name_or_path": base, "task_type": "CAUSAL_LM"}
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if dtype != "float32":
        # Copies, because loaded tensors are parts of the file that is written over.
        tensors = {name: one.to(getattr(torch, dtype), copy=True) for name, one in load_file(weights).items()}
        _require_finite(tensors, dtype)
        save_file(tensors, weights)


def rebuilt(run: LearnerRun, checkpoint: Path, dtype: str) -> Export:
    """Return the policy of a checkpoint, loaded on the CPU as the learner loads it, in `dtype`.

    Shards of any number of ranks are read. The base of an adapter has the run's dtype, as in training.

    Raises:
        ConfigError: The files of `model` are missing, or not those that the run started from.
        ExportError: The checkpoint is damaged.
    """
    model_path, lora = resolve_model(run.model), run.learner.lora
    policy = load_policy(
        model_path,
        dtype=getattr(torch, run.dtype) if lora.rank else torch.float32,
        gradient_checkpointing=False,
        max_model_len=run.server.get("max_model_len"),
    )
    if lora.rank:
        add_adapter(policy, lora, run.seed)
    require_same_model(policy, model_path, digest_model(model_path), checkpoint)
    try:
        read_policy(policy, checkpoint / TRAINED)
    except (OSError, RuntimeError) as error:
        raise ExportError(f"{checkpoint} cannot be read ({error}); export another checkpoint") from error
    return _cast(policy, run, model_path, dtype)


def loaded(run: LearnerRun, exported: Path, dtype: str) -> Export:
    """Return the model/ of a checkpoint, which is in float32, as one in `dtype`."""
    policy = load_policy(exported, gradient_checkpointing=False, max_model_len=run.server.get("max_model_len"))
    return _cast(policy, run, exported, dtype)


def _cast(policy: PreTrainedModel, run: LearnerRun, model_path: Path, dtype: str) -> Export:
    published = PublishedPolicy(Accelerator(cpu=True), policy, getattr(torch, dtype))
    return copy_for_export(published, msgspec.structs.replace(run, dtype=dtype), model_path)


def _require_finite(tensors: Tensors, dtype: str) -> None:
    """Raise ConfigError if a weight is too large for the dtype, as it may be for float16."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ConfigError(
                f"--dtype {dtype}: {name} has values beyond the range of {dtype}; use bfloat16 or float32"
            )
