"""Tiny random models of many families: two layers, the vocabulary of `tiny:digits`, large weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from protocol.model_files import resolve_model

LM: dict[str, Any] = {
    "vocab_size": 16, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 0,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
OF_GROUPED_HEADS = ("num_key_value_heads", "head_dim")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TOWER = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
}  # fmt: skip
IMAGE = {"image_token_id": 12, "video_token_id": 13, "vision_start_token_id": 14, "vision_end_token_id": 15}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: transformers.Qwen2Config(**LM | {"tie_word_embeddings": True}),
    "qwen3": lambda: transformers.Qwen3Config(**LM | {"tie_word_embeddings": True}),
    "llama": lambda: transformers.LlamaConfig(**LM),
    "mistral": lambda: transformers.MistralConfig(**LM, sliding_window=None),
    "gemma2": lambda: transformers.Gemma2Config(
        # Scores far above the cap, so that logprobs differ by 0.1 nats without it.
        **LM | {"tie_word_embeddings": True},
        query_pre_attn_scalar=1,
        attn_logit_softcapping=1.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**LM | {"tie_word_embeddings": True}, query_pre_attn_scalar=32),
    "phi3": lambda: transformers.Phi3Config(**LM),
    "olmo2": lambda: transformers.Olmo2Config(**LM | {"num_key_value_heads": 2}),
    "smollm3": lambda: transformers.SmolLM3Config(**LM | {"tie_word_embeddings": True}),
    "granite": lambda: transformers.GraniteConfig(**LM | {"tie_word_embeddings": True}),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**{key: LM[key] for key in LM if key not in OF_GROUPED_HEADS}),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**LM | EXPERTS, norm_topk_prob=True),
    "mixtral": lambda: transformers.MixtralConfig(**LM, num_local_experts=4, sliding_window=None),
    "gpt_oss": lambda: transformers.GptOssConfig(**LM, num_local_experts=4, num_experts_per_tok=2, sliding_window=64),
    "qwen3_5": lambda: transformers.Qwen3_5Config(
        text_config=LM | {"layer_types": ["full_attention"] * 2},
        vision_config=TOWER,
        tie_word_embeddings=False,
        **IMAGE,
    ),
}


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Return a random model on the CPU in float32."""
    config = FAMILIES[family]()
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    torch.manual_seed(seed)
    model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # biases and sinks start as zeros
    return model


def make_near_ties(model: PreTrainedModel) -> PreTrainedModel:
    """Give the experts of each router nearly the same scores, and let a wrong choice matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "router." in name or "gate.weight" in name:
                mean = parameter.mean(0, keepdim=True)
                parameter.copy_(mean + 0.02 * (parameter - mean))
            if ".experts." in name:
                parameter.mul_(3)
    return model


def save_model(family: str, path: Path) -> None:
    """Save a model as a checkpoint that the config key `model` accepts."""
    make_model(family).save_pretrained(path)
    AutoTokenizer.from_pretrained(resolve_model("tiny:digits")).save_pretrained(path)
