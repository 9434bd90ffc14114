"""The policy: loading it, and the logprobs it gives to the tokens of a micro-batch.

Suffixes: B rows, S tokens of a row, T = S - 1 predicted tokens, V vocabulary.
"""

from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from protocol.errors import ConfigError


def load_policy(path: Path, *, gradient_checkpointing: bool, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the model, dropout off: it would make the learner disagree with the server about every token.

    What is trained must be float32: optimizer steps at RL learning rates vanish in bfloat16. Of a multimodal checkpoint it is the
    text tower. Raises ConfigError if the model cannot be trained.
    """
    transformers.utils.logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(path)
    _check_trainable(config, path)
    for key in vars(config):
        if key.endswith(("dropout", "pdrop")):
            setattr(config, key, 0.0)
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)
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


class Inputs(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What the model reads of a micro-batch."""

    token_ids_BS: torch.Tensor
    attention_mask_BS: torch.Tensor


def token_logprobs(
    model: nn.Module, batch: Inputs, temperature: float, *, entropy_grad: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logprobs_BT, entropy_BT) of the next-token distributions at `temperature`.

    Logits are taken to float32 first, as the server does (`processed_logprobs`).
    """
    output = model(input_ids=batch.token_ids_BS, attention_mask=batch.attention_mask_BS, use_cache=False)
    logits_BTV = output.logits[:, :-1].float() / temperature
    log_normalizer_BT = logits_BTV.logsumexp(dim=-1)
    targets_BT1 = batch.token_ids_BS[:, 1:].unsqueeze(-1)
    logprobs_BT = logits_BTV.gather(-1, targets_BT1).squeeze(-1) - log_normalizer_BT
    with torch.set_grad_enabled(entropy_grad):
        mean_logit_BT = (logits_BTV.softmax(dim=-1) * logits_BTV).sum(dim=-1)
        entropy_BT = log_normalizer_BT - mean_logit_BT
    return logprobs_BT, entropy_BT


@torch.no_grad()
def sequence_logprobs(model: nn.Module, token_ids: list[int], device: torch.device) -> torch.Tensor:
    """Return the logprobs of token_ids[1:], each given what stands before it, on the CPU."""
    token_ids_S = torch.tensor(token_ids, device=device)
    logits_TV = model(input_ids=token_ids_S.unsqueeze(0), use_cache=False).logits[0, :-1].float()
    return logits_TV.log_softmax(dim=-1).gather(-1, token_ids_S[1:].unsqueeze(-1)).squeeze(-1).cpu()
