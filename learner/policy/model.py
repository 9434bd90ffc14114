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

from learner.policy.rope import pin_rope
from protocol.errors import ConfigError


def load_policy(
    path: Path,
    *,
    gradient_checkpointing: bool,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    max_model_len: int | None = None,
) -> PreTrainedModel:
    """Load the model, dropout off and its RoPE that of the server: either would make both sides disagree about every token.

    What is trained must be float32: optimizer steps at RL learning rates vanish in bfloat16. Of a multimodal checkpoint it is the
    text tower. `attn_implementation`: of those of transformers; None: its choice. `max_model_len`: the server's; None: what vLLM
    derives. Raises ConfigError if the model cannot be trained, or not so.
    """
    transformers.utils.logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(path)
    _check_trainable(config, path)
    for key in vars(config):
        if key.endswith(("dropout", "pdrop")):
            setattr(config, key, 0.0)
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
    return model.train()  # from_pretrained gives evaluation mode, in which nothing is checkpointed


def _check_trainable(config: PreTrainedConfig, path: Path) -> None:
    text = config.get_text_config()
    quantization = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ConfigError(
            f"model: {path} is quantized ({method}), and its scales would be missing in every push of trained weights; load it "
            "dequantized with transformers, `save_pretrained` it without quantization_config, and set model to that"
        )
    models: dict[type, Any] = AutoModelForCausalLM._model_mapping
    if type(config) not in models or (text is not config and models[type(config)].config_class is type(config)):
        raise ConfigError(
            f"model: {path} is of the kind {config.model_type!r}, of which transformers has no language model that can be trained "
            "by itself; set model to a checkpoint of text alone (learner/README.md#which-models-run)"
        )


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path)
