"""The policy: loading it from the disk, or refusing it there."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.policy.rope import check_rope, pin_rope
from protocol.errors import ConfigError


def load_policy(
    path: Path,
    *,
    gradient_checkpointing: bool,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    max_model_len: int | None = None,
) -> PreTrainedModel:
    """Load the model in evaluation mode, as it samples: without the dropout, jitter and other routing of training, and with the
    RoPE of the server. Any of those would make both sides disagree about every token.

    What is trained must be float32: optimizer steps at RL learning rates vanish in bfloat16. Of a multimodal checkpoint it is the
    text tower. `attn_implementation`: of those of transformers; None: its choice. `max_model_len`: the server's; None: what vLLM
    derives. Raises ConfigError if the model cannot be trained, or not so.
    """
    transformers.utils.logging.disable_progress_bar()
    config = load_config(path)
    _check_trainable(config, path)
    check_rope(config, max_model_len)
    _switch_off_dropout(config)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=attn_implementation
        )
    except (ValueError, ImportError) as error:
        if attn_implementation is None:
            raise
        raise ConfigError(
            f'learner.attn_implementation = "{attn_implementation}" and model: {path}: {error}. Set it to "packed", "sdpa" or '
            '"eager"'
        ) from error
    pin_rope(model, max_model_len)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
        for module in model.modules():  # in evaluation mode nothing is checkpointed
            module.training = isinstance(module, GradientCheckpointingLayer)
    return model


def load_config(path: Path) -> PreTrainedConfig:
    """Raises ConfigError for a config.json in which something is missing, such as a factor of its RoPE."""
    try:
        return AutoConfig.from_pretrained(path)
    except KeyError as error:
        raise ConfigError(f"model: {path}/config.json cannot be read: {error.args[0]}. Complete it") from error


def _switch_off_dropout(config: PreTrainedConfig) -> None:
    """Under all its names, in the config and in those that it holds: layers that are checkpointed are in training mode themselves."""
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _switch_off_dropout(value)
        elif "drop" in key and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, key, type(value)(0))  # some configs check it


def _check_trainable(config: PreTrainedConfig, path: Path) -> None:
    text = config.get_text_config()
    models: dict[type, Any] = AutoModelForCausalLM._model_mapping
    if type(config) not in models or (text is not config and models[type(config)].config_class is type(config)):
        raise ConfigError(
            f"model: {path} is of the kind {config.model_type!r}, of which transformers has no language model that can be trained "
            "by itself; set model to a checkpoint of text alone (learner/README.md#which-models-run)"
        )


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path)
